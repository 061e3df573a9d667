"""What a report is shown as: a terminal's tables, a page, a page of metrics, files."""
