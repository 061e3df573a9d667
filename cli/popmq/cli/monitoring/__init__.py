"""What is made from the table of metrics: the reference page, dashboards and alert rules."""
