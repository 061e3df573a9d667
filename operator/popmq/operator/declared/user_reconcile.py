"""Users of one cluster that objects declare: a Secret, a user of the cluster, its policy.

A secret is written to its Secret before the cluster has it, so nothing that was made is lost when
the operator ends anywhere.  A rotation keeps the new secret beside the one that is used (`next`)
until the cluster has both; the older one stays good for RETIRE_MS.
"""

import asyncio
import base64
import binascii
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from datetime import datetime
from typing import TypeVar

from google.protobuf.message import Message

from popmq.common.errors import Code
from popmq.common.quantities import DAY_MS
from popmq.common.signing import SECRET_FIELD, Signer
from popmq.common.wire import admin_pb2 as admin
from popmq.operator.declared.metadata_client import ProxyAccess
from popmq.operator.kube.admin_client import AdminClient, DataPlaneUnavailable, on_thread
from popmq.operator.kube.api_client import ApiClient, ApiError
from popmq.operator.model.conditions import FALSE, TRUE, UNKNOWN, ConditionValue, conditions
from popmq.operator.model.manifest import SECRET, USER, Manifest, is_owned_by, make
from popmq.operator.model.names import FINALIZER
from popmq.operator.model.spec import ClusterSpec, SpecError
from popmq.operator.model.users import (
    DISABLED,
    ROTATED_ANNOTATION,
    SECRET_ID_ANNOTATION,
    DeclaredUser,
    annotation,
    changes_of,
    entry_to_wire,
    read_user,
)
from popmq.operator.resources.users import ADMIN, credentials, new_secret, signer_in

logger = logging.getLogger(__name__)

AT_ONCE = 16
RETIRE_MS = DAY_MS
NEXT_FIELD = "next"

R = TypeVar("R", bound=Message)


class UserRefused(Exception):
    """Why an object cannot be as it is wanted; the reason of its condition comes first."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class UserClient:
    """`proxy_address` replaces that of the cluster's Service; calls wait on `threads`."""

    def __init__(self, proxy_address: str = "", threads: Executor | None = None) -> None:
        self._proxy_address = proxy_address
        self._threads = threads

    async def ask(
        self,
        spec: ClusterSpec,
        access: ProxyAccess,
        method: str,
        request: Message,
        reply: type[R],
        *,
        fine: Sequence[int] = (),
    ) -> R:
        """Raises DataPlaneUnavailable, also for a refusal."""

        def asked() -> R:
            with AdminClient(spec, self._proxy_address, access.trusted, access.signer) as port:
                return port.ask(method, request, reply, fine=fine)

        return await on_thread(self._threads, asked)


class UserReconciler:
    """`check` raises when this operator may not write any more."""

    def __init__(
        self,
        api: ApiClient,
        client: UserClient,
        *,
        now: Callable[[], datetime],
        check: Callable[[], None],
    ) -> None:
        self._api = api
        self._client = client
        self._now = now
        self._check = check

    async def keep(
        self, spec: ClusterSpec, access: ProxyAccess, manifests: Sequence[Manifest]
    ) -> bool:
        """Whether all are as wanted.  A bad object harms itself alone."""
        users, refused = [], []
        for manifest in sorted(manifests, key=_age):
            try:
                users.append(read_user(manifest))
            except (SpecError, ValueError, TypeError, KeyError, AttributeError) as error:
                refused.append((manifest, ConditionValue(FALSE, "InvalidSpec", str(error))))
        known: Mapping[str, admin.User] = {}
        trouble: ConditionValue | None = None
        if not access.signer.access_key:
            why = "the BrokerCluster has no users: set its spec.auth.mode"
            trouble = ConditionValue(FALSE, "UsersOff", why)
        elif users:
            try:
                request, reply = admin.ListUsersRequest(), admin.ListUsersReply
                listed = await self._client.ask(spec, access, "ListUsers", request, reply)
                known = {user.name: user for user in listed.users}
            except DataPlaneUnavailable as error:
                why = f"the cluster does not answer: {error}"
                trouble = ConditionValue(UNKNOWN, "NoAnswer", why)
        names: set[str] = set()
        work = []
        for user in users:
            verdict = trouble
            if not user.is_deleting and verdict is None:
                verdict = _taken(user, names)
            names.add(user.name)
            work.append(self._isolated(spec, access, user, known, verdict))
        ready = not refused
        for start in range(0, len(work), AT_ONCE):
            ready &= all(await asyncio.gather(*work[start : start + AT_ONCE]))
        for manifest, verdict in refused:
            await self._tell(manifest, verdict, "")
        return ready

    async def without_cluster(self, cluster: str, manifests: Sequence[Manifest]) -> None:
        """There is no user to be deleted."""
        namespace = manifests[0]["metadata"]["namespace"] if manifests else ""
        why = f"there is no BrokerCluster {cluster} in namespace {namespace}"
        for manifest in manifests:
            if "deletionTimestamp" in manifest["metadata"]:
                await self._release(manifest)
            else:
                await self._tell(manifest, ConditionValue(FALSE, "NoCluster", why), "")

    async def _isolated(
        self,
        spec: ClusterSpec,
        access: ProxyAccess,
        user: DeclaredUser,
        known: Mapping[str, admin.User],
        verdict: ConditionValue | None,
    ) -> bool:
        try:
            if user.is_deleting:
                if verdict is None:
                    await self._delete(spec, access, user)
                return verdict is None
            if verdict is None:
                verdict = await self._kept(spec, access, user, known.get(user.name))
            await self._tell(user.manifest, verdict, user.secret_name)
        except DataPlaneUnavailable as error:
            await self._tell(
                user.manifest, ConditionValue(FALSE, "Refused", str(error)), user.secret_name
            )
            return False
        except ApiError as error:
            if error.is_transient:
                raise
            logger.warning("user not kept", extra={"user": user.name, "reason": str(error)})
            return False
        return verdict.status == TRUE

    async def _kept(
        self,
        spec: ClusterSpec,
        access: ProxyAccess,
        user: DeclaredUser,
        current: admin.User | None,
    ) -> ConditionValue:
        if spec.paused:
            return ConditionValue(FALSE, "Paused", "popmq.io/pause of the cluster is true")
        try:
            await self._hold(user)
            secret = await self._secret(spec, user)
            signer = signer_in(secret)
            if signer is None or signer.access_key != user.name:
                raise UserRefused(
                    "SecretUnusable",
                    f"Secret {user.secret_name} has no access_key {user.name} with a secret: "
                    "delete it, and another one is made",
                )
        except UserRefused as refused:
            return ConditionValue(FALSE, refused.reason, str(refused))
        if current is None:
            current = await self._create(spec, access, user, signer)
            await self._mark(spec, user, {SECRET_ID_ANNOTATION: current.secrets[0].id})
        else:
            for method, request in changes_of(user, current):
                assert isinstance(request, Message), "changes are requests"
                reply = admin.UserReply
                current = (await self._client.ask(spec, access, method, request, reply)).user
            await self._keep_secret(spec, access, user, signer, secret, current)
        await self._rotate(spec, access, user)
        return ConditionValue(TRUE, "AsWanted", f"the cluster has user {user.name} like this")

    async def _create(
        self, spec: ClusterSpec, access: ProxyAccess, user: DeclaredUser, signer: Signer
    ) -> admin.User:
        request = admin.CreateUserRequest(
            name=user.name,
            secret=signer.secret,
            entries=map(entry_to_wire, user.entries),
            networks=user.networks,
        )
        created = await self._client.ask(spec, access, "CreateUser", request, admin.UserReply)
        if not user.enabled:
            altered = admin.AlterUserRequest(name=user.name, state=DISABLED)
            await self._client.ask(spec, access, "AlterUser", altered, admin.UserReply)
        return created.user

    async def _keep_secret(
        self,
        spec: ClusterSpec,
        access: ProxyAccess,
        user: DeclaredUser,
        signer: Signer,
        secret: Manifest,
        current: admin.User,
    ) -> None:
        """The user gets the Secret's secret where it lost it, or never had it."""
        held = annotation(secret, SECRET_ID_ANNOTATION)
        if held not in [known.id for known in current.secrets]:
            added = await self._add(spec, access, user, signer.secret)
            await self._mark(spec, user, {SECRET_ID_ANNOTATION: added})

    async def _rotate(self, spec: ClusterSpec, access: ProxyAccess, user: DeclaredUser) -> None:
        secret = await self._secret(spec, user)
        if annotation(secret, ROTATED_ANNOTATION) == user.rotate:
            return
        if not user.rotate:
            return await self._mark(spec, user, {ROTATED_ANNOTATION: ""})
        pending = _decoded(secret, NEXT_FIELD) or new_secret()
        if not _decoded(secret, NEXT_FIELD):
            await self._merge(spec, user, {"data": {NEXT_FIELD: _encoded(pending)}})
        request = admin.DescribeUserRequest(name=user.name)
        reply = await self._client.ask(spec, access, "DescribeUser", request, admin.UserReply)
        newest = reply.user.secrets[0].id if reply.user.secrets else ""
        # An earlier attempt may have given it to the cluster already.
        if newest == annotation(secret, SECRET_ID_ANNOTATION):
            newest = await self._add(spec, access, user, pending)
        marks = {SECRET_ID_ANNOTATION: newest, ROTATED_ANNOTATION: user.rotate}
        data = {SECRET_FIELD: _encoded(pending), NEXT_FIELD: None}
        await self._merge(spec, user, {"data": data, "metadata": {"annotations": marks}})
        await self._api.event(
            user.manifest, "SecretRotated", f"Secret {user.secret_name} is new", warning=False
        )

    async def _add(
        self, spec: ClusterSpec, access: ProxyAccess, user: DeclaredUser, secret: str
    ) -> str:
        """Its id."""
        request = admin.AlterUserRequest(name=user.name, secret=secret, retire_ms=RETIRE_MS)
        reply = await self._client.ask(spec, access, "AlterUser", request, admin.UserReply)
        return reply.user.secrets[0].id

    # -- objects

    async def _secret(self, spec: ClusterSpec, user: DeclaredUser) -> Manifest:
        """As it is, or a new one.  Raises UserRefused for one that somebody else made."""
        known = await self._api.get(SECRET, spec.namespace, user.secret_name)
        if known is None:
            secret = make(SECRET, user.secret_name, spec.namespace, spec.names.labels())
            secret["metadata"]["ownerReferences"] = [_owner(user)]
            secret["metadata"]["annotations"] = {ROTATED_ANNOTATION: user.rotate}
            secret["type"] = "Opaque"
            secret["data"] = credentials(Signer(user.name, new_secret()))
            self._check()
            return await self._api.create(SECRET, secret)
        if spec.adopts:
            self._check()
            known = await self._api.adopted(SECRET, known, spec.names.labels(), _owner(user))
        if not is_owned_by(known, user.uid):
            raise UserRefused(
                "NameTaken",
                f"Secret {user.secret_name} exists and this User does not own it: "
                "name another one in spec.secretName",
            )
        return known

    async def _mark(self, spec: ClusterSpec, user: DeclaredUser, marks: Mapping[str, str]) -> None:
        await self._merge(spec, user, {"metadata": {"annotations": dict(marks)}})

    async def _merge(self, spec: ClusterSpec, user: DeclaredUser, change: Manifest) -> None:
        self._check()
        await self._api.merge(SECRET, spec.namespace, user.secret_name, change)

    async def _hold(self, user: DeclaredUser) -> None:
        finalizers = user.manifest["metadata"].get("finalizers") or []
        if user.delete and FINALIZER not in finalizers:
            self._check()
            await self._api.set_finalizers(USER, user.manifest, [*finalizers, FINALIZER])

    async def _delete(self, spec: ClusterSpec, access: ProxyAccess, user: DeclaredUser) -> None:
        if user.delete and user.name != ADMIN:
            request = admin.DeleteUserRequest(name=user.name)
            fine = (Code.NOT_FOUND,)
            await self._client.ask(spec, access, "DeleteUser", request, admin.UserReply, fine=fine)
        await self._release(user.manifest)

    async def _release(self, manifest: Manifest) -> None:
        finalizers = manifest["metadata"].get("finalizers") or []
        if FINALIZER in finalizers:
            self._check()
            left = [name for name in finalizers if name != FINALIZER]
            await self._api.set_finalizers(USER, manifest, left)

    async def _tell(self, manifest: Manifest, verdict: ConditionValue, secret: str) -> None:
        metadata, before = manifest["metadata"], manifest.get("status") or {}
        generation = metadata.get("generation", 0)
        status: Manifest = {
            "observedGeneration": generation,
            "conditions": conditions({"Ready": verdict}, before, generation, self._now()),
        }
        if secret:
            status["secretName"] = secret
        if status == before:
            return
        self._check()
        reported: Manifest = {
            "apiVersion": USER.api_version,
            "kind": USER.kind,
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
            "status": status,
        }
        await self._api.apply(USER, reported, sub="status")
        if verdict.status != TRUE:
            await self._api.recurring_event(manifest, verdict.reason, verdict.message)


def _taken(user: DeclaredUser, names: set[str]) -> ConditionValue | None:
    if user.name == ADMIN:
        why = f"user {ADMIN} is the operator's own: give this one another spec.name"
        return ConditionValue(FALSE, "Reserved", why)
    if user.name in names:
        why = f"another User declares {user.name} already: delete one of them"
        return ConditionValue(FALSE, "Duplicate", why)
    return None


def _owner(user: DeclaredUser) -> Manifest:
    return {
        "apiVersion": USER.api_version,
        "kind": USER.kind,
        "name": user.manifest["metadata"]["name"],
        "uid": user.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _age(manifest: Manifest) -> tuple[str, str]:
    metadata = manifest["metadata"]
    return metadata.get("creationTimestamp", ""), metadata["name"]


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _decoded(secret: Manifest, key: str) -> str:
    """Empty for what is missing, or no text."""
    try:
        return base64.b64decode((secret.get("data") or {}).get(key) or "").decode("ascii")
    except (binascii.Error, UnicodeDecodeError):
        return ""
