"""Who may do what: accounts and roles towards the API server, policies between pods.

Only a controller talks to the API server, and only about Leases.  The ports are those of
docs/how-to/kubernetes.md; a pod that is fenced is reached by nobody and reaches nobody.
"""

from collections.abc import Iterable, Sequence

from popmq.operator.model.manifest import (
    NETWORK_POLICY,
    ROLE,
    ROLE_BINDING,
    SERVICE_ACCOUNT,
    Manifest,
    make,
)
from popmq.operator.model.names import (
    ADMIN_PORT,
    BROKER,
    BROKER_PORT,
    CONSOLE,
    CONSOLE_PORT,
    CONTROLLER,
    CONTROLLER_PORT,
    FENCED_LABEL,
    HTTP_PORT,
    OPERATOR_NAME,
    PROXY,
    PUBLIC_PORT,
    REPORT,
    ROLES,
)
from popmq.operator.model.spec import ClusterSpec
from popmq.operator.resources.proxies import client_ports


def accounts(spec: ClusterSpec) -> list[Manifest]:
    names = spec.names
    plain = make(SERVICE_ACCOUNT, f"{spec.name}-popmq", spec.namespace, names.labels())
    plain["automountServiceAccountToken"] = False
    name = f"{spec.name}-controller"
    account = make(SERVICE_ACCOUNT, name, spec.namespace, names.labels(CONTROLLER))
    role = make(ROLE, name, spec.namespace, names.labels(CONTROLLER))
    # A Lease is created under a name that no rule can hold before it is there.
    role["rules"] = [
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "verbs": ["get", "create", "update"],
        }
    ]
    binding = make(ROLE_BINDING, name, spec.namespace, names.labels(CONTROLLER))
    binding["roleRef"] = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    binding["subjects"] = [{"kind": "ServiceAccount", "name": name, "namespace": spec.namespace}]
    return [plain, account, role, binding]


# A port of any address: a cluster may run its own resolver on every node.
_NAMES: Manifest = {"ports": [{"protocol": kind, "port": 53} for kind in ("UDP", "TCP")]}


def network_policies(spec: ClusterSpec) -> list[Manifest]:
    """Who may connect to each role, and where brokers and proxies may connect.

    A controller may connect anywhere, because no policy can name the API server, and so may a
    report, which writes where its arguments say.
    """
    names = spec.names
    ours = {role: {"podSelector": {"matchLabels": names.selector(role)}} for role in ROLES}
    operator = {
        "namespaceSelector": {},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": OPERATOR_NAME}},
    }
    reports = {"podSelector": {"matchLabels": names.selector(REPORT)}}
    console = {"podSelector": {"matchLabels": names.selector(CONSOLE)}}
    brokers, proxies, controllers = (ours[role] for role in ROLES)
    tools = [operator, reports, *([console] if spec.console else [])]
    clients = None if spec.clients is None else [*spec.clients, *tools]
    pages = _rule("from", [HTTP_PORT])  # metrics and health, for anybody
    out = [
        _rule("to", [BROKER_PORT], [brokers]),
        _rule("to", [CONTROLLER_PORT], [controllers]),
        _NAMES,
    ]
    members = [brokers, proxies, controllers]
    policies = [
        _policy(spec, BROKER, [_rule("from", [BROKER_PORT], members), pages], out),
        _policy(spec, CONTROLLER, [_rule("from", [CONTROLLER_PORT], [*members, operator]), pages]),
        _policy(
            spec,
            PROXY,
            [
                _rule("from", client_ports(spec).values(), clients),
                _rule("from", [ADMIN_PORT], [*spec.administrators, *tools]),
                pages,
            ],
            out,
        ),
        _policy(spec, REPORT, [{"from": [reports]}]),
    ]
    if spec.console:
        to_proxies = _rule("to", [PUBLIC_PORT, ADMIN_PORT], [proxies])
        callers = _rule("from", [CONSOLE_PORT], spec.console_callers)
        policies.append(_policy(spec, CONSOLE, [callers], [to_proxies, _NAMES]))
    fenced = make(NETWORK_POLICY, f"{spec.name}-fenced", spec.namespace, names.labels())
    fenced["spec"] = {
        "podSelector": {"matchLabels": {**names.selector(), FENCED_LABEL: "true"}},
        "policyTypes": ["Ingress", "Egress"],
    }
    return [*policies, fenced]


def _rule(
    direction: str, ports: Iterable[int], peers: Sequence[Manifest] | None = None
) -> Manifest:
    """`peers` None: every peer."""
    rule: Manifest = {"ports": [{"protocol": "TCP", "port": port} for port in ports]}
    if peers is not None:
        rule[direction] = list(peers)
    return rule


def _policy(
    spec: ClusterSpec, role: str, ingress: list[Manifest], egress: list[Manifest] | None = None
) -> Manifest:
    """`egress` None: the role may connect anywhere."""
    network_policy = make(
        NETWORK_POLICY, f"{spec.name}-{role}", spec.namespace, spec.names.labels(role)
    )
    network_policy["spec"] = {
        "podSelector": {
            "matchLabels": spec.names.selector(role),
            # Policies add up: one that let calls in would undo the fence.
            "matchExpressions": [{"key": FENCED_LABEL, "operator": "DoesNotExist"}],
        },
        "policyTypes": ["Ingress"],
        "ingress": ingress,
    }
    if egress is not None:
        network_policy["spec"]["policyTypes"].append("Egress")
        network_policy["spec"]["egress"] = egress
    return network_policy
