"""Who may do what: accounts and roles towards the API server, policies between pods.

Only a controller talks to the API server, and only about Leases.  The ports are those of
docs/operating.md; a pod that is fenced is reached by nobody and reaches nobody.
"""

from popmq.operator.model.manifest import (
    NETWORK_POLICY,
    ROLE,
    ROLE_BINDING,
    SERVICE_ACCOUNT,
    Manifest,
    make,
)
from popmq.operator.model.names import (
    BROKER,
    BROKER_PORT,
    CONTROLLER,
    CONTROLLER_PORT,
    FENCED_LABEL,
    HTTP_PORT,
    OPERATOR_NAME,
    PROXY,
    PUBLIC_PORT,
    REPORT,
)
from popmq.operator.model.spec import ClusterSpec


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


def network_policies(spec: ClusterSpec) -> list[Manifest]:
    names = spec.names
    ours = {role: {"podSelector": {"matchLabels": names.selector(role)}} for role in _ROLES}
    operator = {
        "namespaceSelector": {},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": OPERATOR_NAME}},
    }
    reports = {"podSelector": {"matchLabels": names.selector(REPORT)}}
    brokers, proxies, controllers = (ours[role] for role in _ROLES)
    policies = [
        _policy(spec, BROKER, BROKER_PORT, [brokers, proxies, controllers]),
        _policy(spec, CONTROLLER, CONTROLLER_PORT, [brokers, proxies, controllers, operator]),
        _policy(spec, PROXY, PUBLIC_PORT, _clients(spec, operator, reports)),
    ]
    fenced = make(NETWORK_POLICY, f"{spec.name}-fenced", spec.namespace, names.labels())
    fenced["spec"] = {
        "podSelector": {"matchLabels": {**names.selector(), FENCED_LABEL: "true"}},
        "policyTypes": ["Ingress", "Egress"],
    }
    return [*policies, fenced]


_ROLES = (BROKER, PROXY, CONTROLLER)


def _clients(spec: ClusterSpec, operator: Manifest, reports: Manifest) -> list[Manifest] | None:
    return None if spec.clients is None else [*spec.clients, operator, reports]


def _policy(spec: ClusterSpec, role: str, port: int, callers: list[Manifest] | None) -> Manifest:
    """`callers` None: anybody. Metrics and health may be asked for by anybody."""
    made = make(NETWORK_POLICY, f"{spec.name}-{role}", spec.namespace, spec.names.labels(role))
    calls: Manifest = {"ports": [{"protocol": "TCP", "port": port}]}
    if callers is not None:
        calls["from"] = callers
    made["spec"] = {
        "podSelector": {
            "matchLabels": spec.names.selector(role),
            # Policies add up: one that let calls in would undo the fence.
            "matchExpressions": [{"key": FENCED_LABEL, "operator": "DoesNotExist"}],
        },
        "policyTypes": ["Ingress"],
        "ingress": [calls, {"ports": [{"protocol": "TCP", "port": HTTP_PORT}]}],
    }
    return made
