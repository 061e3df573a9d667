"""What a process answers when it is asked for its settings."""

import json

from popmq.common.errors import Code
from popmq.common.settings.settings import Settings
from popmq.common.wire import admin_pb2


def process_settings(role: str, process: str, settings: Settings) -> admin_pb2.ProcessSettings:
    """Values as JSON; secrets are in files, whose paths alone are settings."""
    values = {key: json.dumps(value) for key, value in settings.flat().items()}
    return admin_pb2.ProcessSettings(role=role, process=process, values=values)


def settings_reply(role: str, process: str, settings: Settings) -> bytes:
    """Of this process alone, as an answer to DESCRIBE_SETTINGS."""
    status = admin_pb2.Status(code=Code.OK, message="OK")
    processes = [process_settings(role, process, settings)]
    return admin_pb2.DescribeSettingsReply(status=status, processes=processes).SerializeToString()
