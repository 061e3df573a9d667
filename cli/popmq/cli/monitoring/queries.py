"""Words of queries that many panels use."""

RATE = "[$__rate_interval]"


def rate(name: str, by: str = "instance") -> str:
    return f"sum by ({by}) (rate({name}{RATE}))"


def quantile(name: str, at: float, by: str = "instance", only: str = "") -> str:
    return f"histogram_quantile({at}, sum by ({by}, le) (rate({name}_bucket{only}{RATE})))"
