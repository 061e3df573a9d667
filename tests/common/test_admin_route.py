"""AdminRoute: which of several addresses is asked for administration."""

from popmq.common.admin_endpoint import AdminEndpoint, AdminRoute, refusal

SERVICE = "popmq.admin.v1.Admin"
NAMED = AdminEndpoint("0123456789abcdef", "unix:/run/x.sock")


def used(route: AdminRoute) -> str:
    return route.used.address


def test_the_public_port_is_asked_where_nobody_listens_at_the_admin_port() -> None:
    route = AdminRoute(["admin:8082", "public:8081"])
    assert used(route) == "admin:8082"
    assert not route.is_last
    assert route.go_on(implemented=True, details="connection refused")
    assert used(route) == "public:8081"
    assert route.is_last
    assert not route.go_on(implemented=True, details="connection refused")


def test_a_public_port_that_names_its_admin_port_leads_there() -> None:
    route = AdminRoute(["public:8081"])
    assert route.go_on(implemented=False, details=refusal(SERVICE, NAMED))
    assert route.used == NAMED


def test_a_refusal_that_names_nothing_is_the_end() -> None:
    route = AdminRoute(["public:8081"])
    assert not route.go_on(implemented=False, details=refusal(SERVICE, None))
    assert used(route) == "public:8081"


def test_a_named_admin_port_that_is_gone_is_asked_for_again() -> None:
    """The proxy was started anew: its public port names another id, and perhaps address."""
    route = AdminRoute(["public:8081"])
    route.go_on(implemented=False, details=refusal(SERVICE, NAMED))
    assert not route.go_on(implemented=True, details="connection refused")
    assert used(route) == "public:8081"
    later = AdminEndpoint("fedcba9876543210", NAMED.address)
    assert route.go_on(implemented=False, details=refusal(SERVICE, later))
    assert route.used == later
