"""Settings of what a cluster's processes know each other by: its name, its secret, its TLS."""

from dataclasses import dataclass

from popmq.common.settings.section import SettingsSection, matching, name_of


@dataclass(frozen=True, slots=True)
class ClusterSettings(SettingsSection):
    name: str = name_of("popmq")
    formerly: str = name_of("", optional=True)  # whose data directory a broker may take over
    secret_file: str = ""  # what our processes prove to each other that they know
    secret_required: bool = True  # false while a cluster is moved to a secret
    tls_certificate: str = ""  # of this process, for frames
    tls_key: str = ""
    tls_authority: str = ""  # who signed those of all processes
    tls_name: str = matching("popmq", r"[a-zA-Z0-9.-]{1,60}", "1 to 60 letters, digits, . or -")
    tls_required: bool = True  # false while a cluster is moved to TLS

    def relations(self) -> None:
        files = "tls_certificate", "tls_key", "tls_authority"
        given = [name for name in files if getattr(self, name)]
        for name in files:
            if given and name not in given:
                raise self.refuse(name, f"needed beside cluster.{given[0]}")
