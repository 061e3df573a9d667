"""`python -m popmq.cli.roles.healthcheck`: whether the popmq process of this container serves.

The image's HEALTHCHECK runs it.  The process listens where its environment says, as the image
passes settings; `--http-port` and files of settings are not seen here.
"""

import sys
from http.client import HTTPConnection, HTTPException

from popmq.common.address import format_address, parse_address
from popmq.common.errors import ConfigError
from popmq.common.settings.settings import environment, load_settings

TIMEOUT_S = 4  # less than the HEALTHCHECK's own time
EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def main() -> int:
    try:
        http = load_settings(None, environment(), {}).settings.http
    except ConfigError as error:
        print(f"unhealthy: {error}")
        return 1
    host, port = parse_address(http.health_listen or http.listen)
    host = EVERY_ADDRESS.get(host, host)
    connection = HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/readyz")
        status = connection.getresponse().status
    except (OSError, HTTPException) as error:
        print(f"unhealthy: {format_address(host, port)} (http.listen): {error}")
        return 1
    finally:
        connection.close()
    print(f"/readyz of {format_address(host, port)} answered {status}")
    return 0 if status == 200 else 1


if __name__ == "__main__":
    sys.exit(main())
