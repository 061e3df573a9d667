"""The table of every metric, from which the metrics, their page, dashboards and alerts are made."""
