"""How proxies check who calls, as settings; whether they do is the cluster's auth.mode
(docs/concepts/users.md)."""

from dataclasses import dataclass

from popmq.common.settings.section import SettingsSection, within


@dataclass(frozen=True, slots=True)
class AuthSettings(SettingsSection):
    key_file: str = ""  # of the keys that seal users' secrets; only proxies read it
    admin_file: str = ""  # of the first Super user; "": users are made by hand
    skew_ms: int = within(120_000, 1_000, 600_000)  # of a signed date, each way
    # The longest that an address waits after calls with no good signature; 0: it never waits.
    failure_wait_ms: int = within(30_000, 0, 3_600_000)
    stale_ms: int = within(600_000, 5_000, 86_400_000)  # without the owner of users

    def relations(self) -> None:
        if self.admin_file and not self.key_file:
            raise self.refuse("admin_file", "needs auth.key_file, which seals its secret")
