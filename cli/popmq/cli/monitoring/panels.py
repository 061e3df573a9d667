"""All dashboards, in the order in which an operator meets them."""

from popmq.cli.monitoring.cluster_panels import KUBERNETES, PROXIES, REPLICATION, TIMERS
from popmq.cli.monitoring.message_panels import LAG, OVERVIEW, POP

DASHBOARDS = (OVERVIEW, LAG, POP, TIMERS, REPLICATION, PROXIES, KUBERNETES)
