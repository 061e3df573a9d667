"""What lite topics may cost, and how long they live, as settings (docs/concepts/lite-topics.md)."""

from dataclasses import dataclass

from popmq.common.quantities import DAY_MS
from popmq.common.settings.section import SettingsSection, constant, within


@dataclass(frozen=True, slots=True)
class LiteSettings(SettingsSection):
    max_topics: int = within(10_000, 1, 200_000)  # of one parent topic at one broker group
    max_client_subscriptions: int = within(2_000, 1, 100_000)  # of one client, to one parent topic
    max_subscriptions: int = within(500_000, 1, 10_000_000)  # of all clients, at one broker
    # Without a message; a topic may say its own.
    ttl_ms: int = within(3 * DAY_MS, 1_000, 30 * DAY_MS)
    ttl_ends_subscriptions: bool = False  # to a lite topic whose time to live is over
    subscription_expiry_ms: int = constant(100_000)  # without a word of its client
