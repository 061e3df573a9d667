"""A node whose brokers take their time, so that each guard of a roll is alone with its duty once.

Time is counted in looks of the operator: whoever acts too early does it within them, however slow
or fast the machine is.  A pod that goes is there for some looks more, and Kubernetes lets some pass
until it makes another.  That one is in sync before it is ready, since nobody has probed it yet, or,
where it is one of `late`, ready before it is in sync.  The controllers' part is in SlowBrokers:
they say what the pods' conditions say.
"""

import signal
from collections.abc import Callable, Collection
from typing import Any

from kube.control_plane import ControlPlane
from kube.fake_api import Object
from kube.kubelet import Kubelet, conditions
from kube.world import Brokers

from popmq.operator.cluster.observed import GroupHealth
from popmq.operator.model.manifest import condition, name_of
from popmq.operator.model.spec import ClusterSpec

LOOKS = 3  # the first may have begun before
LATE_LOOKS = 10  # a hand-over and a restart fit in, with an operator that is killed at each
IN_SYNC = "test.popmq.dev/InSync"
NAME = "slow"
# Of a BrokerCluster's brokers: there, and nowhere else.
TEMPLATE: Object = {
    "nodeSelector": {"kubelet": NAME},
    "tolerations": [{"key": "kubelet", "operator": "Exists"}],
}


class SlowNode(Kubelet):
    def __init__(
        self, plane: ControlPlane, looks: Callable[[], int], *, late: Collection[str] = ()
    ) -> None:
        super().__init__(plane, NAME, alone=True)
        self._looks = looks
        self._late = late
        self._begun: dict[tuple[str, bool], int] = {}  # by uid, and whether it goes
        self._told: dict[str, list[Object]] = {}
        self._resting = 0  # until then Kubernetes makes no pods

    def __exit__(self, *raised: Any) -> None:
        try:
            super().__exit__(*raised)
        finally:
            self._rest(False)

    def see(self, pods: list[Object]) -> None:
        if self._resting and self._looks() >= self._resting:
            self._rest(False)
        for pod in pods:
            uid, goes = pod["metadata"]["uid"], "deletionTimestamp" in pod["metadata"]
            looks = self._looks()
            expected = LATE_LOOKS if name_of(pod) in self._late and not goes else LOOKS
            rested = looks >= self._begun.setdefault((uid, goes), looks) + expected
            if not goes:
                self._keep(pod, rested)
            elif rested:
                self._rest(True)
                self.remove(pod)

    def _rest(self, begins: bool) -> None:
        self._resting = self._looks() + LOOKS if begins else 0
        makers = self.plane.processes["kube-controller-manager"]
        makers.send_signal(signal.SIGSTOP if begins else signal.SIGCONT)

    def _keep(self, pod: Object, rested: bool) -> None:
        late = name_of(pod) in self._late
        ready, in_sync = rested or late, rested or not late
        given = {"Ready": ready, "ContainersReady": ready, IN_SYNC: in_sync}
        expected = conditions(PodScheduled=True, **given)
        uid = pod["metadata"]["uid"]
        if self._told.get(uid) == expected:
            return
        (container,) = pod["spec"]["containers"]
        state = {"state": {"running": {}}, "ready": ready, "restartCount": 0}
        about = {"name": container["name"], "image": container["image"], "imageID": ""}
        running = {"phase": "Running", "containerStatuses": [{**about, **state}]}
        if self.tell(pod, {**running, "conditions": expected}):
            self._told[uid] = expected


class SlowBrokers(Brokers):
    """`fewest` is how many of a group were in sync at the worst look, once all had been."""

    fewest = 1_000

    def look_at(self, spec: ClusterSpec, group: str) -> GroupHealth:
        key = self.key(spec, group)
        pods = [
            pod
            for pod in self._api.all("pods", spec.namespace)
            if pod["metadata"]["labels"].get("popmq.io/broker-group") == group
            and (pod.get("status") or {}).get("phase") == "Running"
        ]
        alive = frozenset(map(name_of, pods))
        members = {
            name_of(pod)
            for pod in pods
            if condition(pod, IN_SYNC) == "True" and "deletionTimestamp" not in pod["metadata"]
        }
        begun = key in self.masters or len(members) == spec.brokers.replicas
        if begun:
            self.fewest = min(self.fewest, len(members))
            if self.masters.get(key) not in members:
                self.masters[key] = min(members, default="")
        self.in_sync[key] = members
        return GroupHealth(
            master=self.masters.get(key, ""),
            epoch=1,
            in_sync=frozenset(members),
            alive=alive,
            owner=group == "broker-0",
        )
