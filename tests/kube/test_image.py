"""The Dockerfile: what it says, and every role from what its steps make, as its own user."""

import fnmatch
import importlib.util
import json
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from kube.clusters import LARGE, read
from kube.control_plane import ROOT, free_ports
from kube.sandbox import Sandbox, Stage, read_dockerfile, stage_line
from kube.world import NOW
from programs import run_program

from popmq.common.version import VERSION
from popmq.operator.cluster.desired import ClusterInputs, desired, first_shapes
from popmq.operator.resources.config import DATA_FOLDER
from popmq.operator.resources.pods import USER

STAGES = read_dockerfile(ROOT / "Dockerfile")
LIMIT_BYTES = 250_000_000  # of the operator's image: the Kubernetes client takes 105 MB
COMPRESSED_LIMIT_BYTES = 35_000_000  # of popmq's layers, to be fetched


def steps(name: str, word: str) -> list[str]:
    line = stage_line(STAGES, name)
    return [rest for stage in line for step, rest in stage.steps if step == word]


def environment(name: str) -> dict[str, str]:
    found_environment = {}
    for rest in steps(name, "ENV"):
        for pair in rest.split():
            key, _, value = pair.partition("=")
            found_environment[key] = value
    return found_environment


def entry_point(name: str) -> list[str]:
    document: list[str] = json.loads(steps(name, "ENTRYPOINT")[-1])
    return document


def test_the_last_stage_is_the_image_of_every_role() -> None:
    assert STAGES[-1].name == "popmq"
    assert {"popmq", "operator", "reports"} <= {stage.name for stage in STAGES}


def test_the_image_advertises_no_address_so_clients_go_on_with_the_one_they_dialled() -> None:
    assert not any("advertise" in word.lower() for word in steps("popmq", "CMD"))
    assert not any("ADVERTISE" in name for name in environment("popmq"))


@pytest.mark.parametrize("target", ["popmq", "operator", "reports"])
def test_every_image_checks_its_health(target: str) -> None:
    (check,) = steps(target, "HEALTHCHECK")
    command = json.loads(check.partition("CMD ")[2])
    assert command[0].startswith("/opt/popmq/bin/")
    assert importlib.util.find_spec(command[2]) is not None


def test_every_target_is_built_for_two_architectures_with_a_list_of_its_packages() -> None:
    plan = json.loads((ROOT / "docker-bake.json").read_text(encoding="utf-8"))
    targets = plan["group"]["default"]["targets"]
    assert [plan["target"][name]["target"] for name in targets] == ["popmq", "operator", "reports"]
    assert all(plan["target"][name]["inherits"] == ["_all"] for name in targets)
    assert {target for target in targets} <= {stage.name for stage in STAGES}
    assert plan["target"]["_all"]["platforms"] == ["linux/amd64", "linux/arm64"]
    assert "type=sbom" in plan["target"]["_all"]["attest"]
    assert plan["variable"]["TAG"]["default"] == VERSION


def python_configured_with(folder: Path, options: str) -> Path:
    """An interpreter that no package has, and that says it was configured with these options."""
    run_program([sys.executable, "-m", "venv", "--copies", "--without-pip", folder], check=True)
    variables = dict(sysconfig.get_config_vars(), CONFIG_ARGS=options)
    text = f"build_time_vars = {variables!r}\n"
    (folder / "build_options.py").write_text(text, encoding="utf-8")
    return folder / "bin"


@pytest.mark.parametrize(
    ("options", "refusal"),
    [("'--enable-optimizations' '--with-lto'", ""), ("'--enable-shared'", "choose another base")],
)
def test_a_build_takes_no_python_that_was_compiled_without_optimizations(
    tmp_path: Path, options: str, refusal: str
) -> None:
    folder = python_configured_with(tmp_path, options)
    environment = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "PYTHONPATH": str(tmp_path),
        "_PYTHON_SYSCONFIGDATA_NAME": "build_options",
    }
    done = run_program(["bash", str(ROOT / "tools/image.sh"), "python"], env=environment)
    assert (done.returncode, refusal in done.stderr) == (1 if refusal else 0, True), done.stderr


def test_every_stage_that_installs_takes_the_bundle_of_cas_that_is_given() -> None:
    installing = [stage for stage in STAGES if any(" install " in rest for _, rest in stage.steps)]
    assert [stage.name for stage in installing] == ["build", "build-operator", "build-reports"]
    assert all(("ARG", "PIP_CERT=") in stage.steps for stage in installing)


@pytest.mark.parametrize("target", ["popmq", "operator", "reports"])
def test_an_image_runs_as_the_user_that_the_operators_pods_have(target: str) -> None:
    assert steps(target, "USER") == [f"{USER}:{USER}"]
    assert environment(target)["POPMQ_BROKER_DATA"] == DATA_FOLDER
    assert entry_point(target) == ["/opt/popmq/bin/popmq"]
    chart = (ROOT / "charts/popmq/templates/operator.yaml").read_text(encoding="utf-8")
    assert f"runAsUser: {USER}" in chart
    # Whatever is mounted there belongs to that user.
    assert any(f"--chown={USER}:{USER} {DATA_FOLDER}" in step for step in steps(target, "COPY"))


def test_the_operator_starts_roles_as_the_image_understands_them() -> None:
    spec = read(LARGE)
    for manifest in desired(spec, first_shapes(spec), ClusterInputs(NOW)):
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            (container,) = manifest["spec"]["template"]["spec"]["containers"]
            assert "command" not in container
            assert container["args"][0] in ("broker", "proxy", "controller", "console")
            assert container["securityContext"]["readOnlyRootFilesystem"] is True


class Image:
    """What the Dockerfile's steps have made, sealed."""

    def __init__(self, sandbox: Sandbox, folder: Path, compressed_bytes: int = 0) -> None:
        self.sandbox = sandbox
        self.compressed_bytes = compressed_bytes  # of what the target popmq adds to its base
        self._folder = folder
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, *arguments: str, **settings: str) -> dict[str, str]:
        """The words of the ready line."""
        self.processes[name] = process = self.begin(name, *arguments, **settings)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready: "), f"{line}{self.log(name)}"
        words = line.removeprefix("ready: ").replace(",", " ").split()
        return dict(zip(words[::2], words[1::2], strict=False))

    def begin(self, name: str, *arguments: str, **settings: str) -> "subprocess.Popen[str]":
        return self.sandbox.start(
            [*entry_point("popmq"), *arguments],
            {**environment("popmq"), **settings},
            user=steps("popmq", "USER")[-1],
            log=self._folder / f"{name}.log",
        )

    def say(self, *arguments: str, limit_s: float = 60) -> str:
        """A command's output."""
        process = self.begin("command", *arguments)
        output, _ = process.communicate(timeout=limit_s)
        assert process.returncode == 0, self.log("command")
        return output

    def read(self, path: str) -> str:
        process = self.sandbox.start(
            ["/bin/cat", path], {}, user=steps("popmq", "USER")[-1], log=self._folder / "cat.log"
        )
        return process.communicate(timeout=60)[0]

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def copied_source(to: Path) -> Path:
    """As a builder sends it: without what .dockerignore names."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    anywhere = [pattern.removeprefix("**/") for pattern in patterns if pattern.startswith("**/")]
    top = [pattern for pattern in patterns if "/" not in pattern]
    to.mkdir()
    for path in ROOT.iterdir():
        if any(fnmatch.fnmatch(path.name, name) for name in top + anywhere):
            continue
        if path.is_dir():
            shutil.copytree(path, to / path.name, ignore=shutil.ignore_patterns(*anywhere))
        else:
            shutil.copy2(path, to / path.name)
    for kept in (pattern.removeprefix("!") for pattern in patterns if pattern.startswith("!")):
        (to / kept).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / kept, to / kept)
    return to


def built(sandbox: Sandbox, stages: list[Stage]) -> None:
    variables: dict[str, str] = {}
    for stage in stages:
        for word, rest in stage.steps:
            if word == "ENV":
                pairs = [pair.partition("=") for pair in rest.split()]
                variables.update({key: value for key, _, value in pairs})
            elif word == "RUN" and rest.endswith("image.sh python") and sys.base_prefix != "/usr":
                continue  # this machine's Python stands in for the base image's
            elif word == "RUN" and " sbom " in rest and stage.base != "${BASE}":
                continue  # that of the first stage shows that it works
            elif word == "RUN":
                # The cache of this machine, which no image takes with it.
                sandbox.run(rest, {**variables, "PIP_NO_CACHE_DIR": "0"})


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    folder = tmp_path_factory.mktemp("image")
    with Sandbox(folder, copied_source(folder / "source")) as sandbox:
        popmq, *operator = stage_line(STAGES, "build-operator")
        built(sandbox, [popmq])
        # A controller on Kubernetes runs in this image, without the operator's packages.
        imports = "import popmq.controller.lease_store, popmq.console.web.server"
        sandbox.run("grep -q CycloneDX /opt/popmq/sbom.cdx.json", {})
        sandbox.run(f"/opt/popmq/bin/python -c '{imports}'", {})
        size = sandbox.compressed_bytes("/opt/popmq")
        built(sandbox, operator)
        sandbox.seal(DATA_FOLDER)
        image = Image(sandbox, folder, compressed_bytes=size)
        try:
            yield image
        finally:
            image.stop()


def get(port: str, page: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{page}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def port_of(ready: Mapping[str, str]) -> str:
    match = re.search(r":(\d+)/metrics", ready["metrics"])
    assert match is not None
    return match[1]


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_every_role_serves_as_its_user_on_a_read_only_root(image: Image) -> None:
    assert image.sandbox.size_bytes("/opt/popmq") < LIMIT_BYTES
    assert image.compressed_bytes < COMPRESSED_LIMIT_BYTES
    at_controller, at_broker, nobody = free_ports(3)
    http = {"POPMQ_HTTP_LISTEN": "127.0.0.1:0"}
    known = {**http, "POPMQ_CONTROLLER_ADDRESSES": f"127.0.0.1:{at_controller}"}
    listen = f"127.0.0.1:{at_controller}"
    started = {
        "controller": image.start(
            "controller", "controller", **http, POPMQ_CONTROLLER_LISTEN=listen
        )
    }
    image_proxy = image.begin("proxy", "proxy", **known, POPMQ_PROXY_LISTEN="127.0.0.1:0")
    image.processes["proxy"] = image_proxy
    assert image_proxy.stdout is not None
    words = image_proxy.stdout.readline().removeprefix("ready: ").replace(",", " ").split()
    proxy = started["proxy"] = dict(zip(words[::2], words[1::2], strict=False))
    # A proxy without brokers lives, and is not to be sent clients.
    assert get(port_of(proxy), "/livez")[0] == 200
    assert get(port_of(proxy), "/readyz")[0] == 503
    started["broker"] = image.start(
        "broker",
        "broker",
        **known,
        POPMQ_BROKER_LISTEN=f"127.0.0.1:{at_broker}",
        POPMQ_STORE_SEGMENT_BYTES="64MiB",  # as up
    )
    endpoint = ("--endpoint", proxy["endpoint"])
    image.say("topic", "create", "orders", *endpoint)
    image.say("group", "create", "readers", *endpoint)
    image.say("send", "orders", "one", *endpoint)
    assert "one" in image.say("recv", "orders", "--group", "readers", "--ack", *endpoint)

    config = "POPMQ_OPERATOR_KUBECONFIG"
    kubeconfig = image.sandbox.written("kubeconfig", _kubeconfig(nobody))
    started["operator"] = image.start("operator", "operator", **http, **{config: kubeconfig})
    for name, ready in started.items():
        assert get(port_of(ready), "/livez")[0] == 200, name
        assert get(port_of(ready), "/readyz")[0] == 200, name
        status = Path(f"/proc/{image.processes[name].pid}/status").read_text()
        assert re.search(rf"^Uid:\t{USER}\t{USER}\t{USER}\t{USER}$", status, re.MULTILINE), name
        assert re.search(r"^CapEff:\t0+$", status, re.MULTILINE), name
        assert re.search(r"^NoNewPrivs:\t1$", status, re.MULTILINE), name
    for name in ("operator", "proxy", "broker", "controller"):
        process = image.processes[name]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0, image.log(name)


def _kubeconfig(port: int) -> str:
    """Of an API server that does not answer."""
    return json.dumps(
        {
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "u", "user": {"token": "none"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
    )


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_nothing_but_the_volume_and_tmp_can_be_written(image: Image) -> None:
    # Everybody may write into /var/tmp, were it not for the root that nobody may write to.
    script = "touch /var/lib/popmq/x /tmp/x && ! touch /var/tmp/x && echo sealed"
    process = image.sandbox.start(
        ["/bin/sh", "-c", script],
        environment("popmq"),
        user=steps("popmq", "USER")[-1],
        log=image.sandbox.folder / "sealed.log",
    )
    assert process.communicate(timeout=60)[0] == "sealed\n"


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_without_arguments_it_is_a_popmq_to_try(image: Image) -> None:
    (command,) = (json.loads(rest) for rest in steps("popmq", "CMD"))
    ports = {"--port": "0", "--http-port": "0"}
    more = [word for pair in ports.items() for word in pair]
    ready = image.start("up", *command, *more)
    endpoint = ("--endpoint", f"127.0.0.1:{ready['endpoint'].rpartition(':')[2]}")
    image.say("send", "hello", "one", *endpoint)
    image.processes["up"].send_signal(signal.SIGTERM)
    assert image.processes["up"].wait(timeout=60) == 0, image.log("up")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_image_with_spark_makes_a_report_as_its_user(tmp_path: Path) -> None:
    with Sandbox(tmp_path, copied_source(tmp_path / "source")) as sandbox:
        built(sandbox, stage_line(STAGES, "build-reports"))
        sandbox.seal(DATA_FOLDER)
        image = Image(sandbox, tmp_path)
        try:
            assert "readers" in a_report(image)
        finally:
            image.stop()


def a_report(image: Image) -> str:
    """Of what one consumer of two messages has left."""
    ready = image.start("up", "up", "--port", "0", "--http-port", "0")
    endpoint = ("--endpoint", ready["endpoint"])
    image.say("topic", "create", "orders", *endpoint)
    image.say("group", "create", "readers", *endpoint)
    for body in ("one", "two"):
        image.say("send", "orders", body, *endpoint)
    image.say("recv", "orders", "--group", "readers", "--ack", *endpoint)
    return image.say("report", "lag", "--json", *endpoint, limit_s=300)


def buildah(*arguments: str) -> str:
    done = run_program(["buildah", *arguments])
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def made_by_buildah(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[Image, dict[str, Any]]]:
    """The target that the test names, in a sandbox, and what its image says of itself."""
    missing = [name for name in ("buildah", "debootstrap") if not shutil.which(name)]
    if missing:
        pytest.skip(f"no {', '.join(missing)}: the Dockerfile is not built")
    tag = f"localhost/popmq-test-{request.param}:1"
    command = ["bash", str(ROOT / "tools" / "build-image.sh"), request.param, tag]
    done = run_program(command)
    assert done.returncode == 0, done.stdout + done.stderr
    container = buildah("from", "--pull-never", tag)
    try:
        root = Path(buildah("mount", container))
        with Sandbox(tmp_path, image=root) as sandbox:
            sandbox.seal(DATA_FOLDER)
            image = Image(sandbox, tmp_path)
            try:
                yield image, json.loads(buildah("inspect", container))["OCIv1"]["config"]
            finally:
                image.stop()
    finally:
        buildah("rm", container)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("made_by_buildah", ["popmq", "operator", "reports"], indirect=True)
def test_what_buildah_makes_of_the_dockerfile_runs_as_its_user_on_a_read_only_root(
    made_by_buildah: tuple[Image, dict[str, Any]], request: pytest.FixtureRequest
) -> None:
    image, reported_made_by_buildah = made_by_buildah
    target = request.node.callspec.params["made_by_buildah"]
    # What the test of the steps goes by is what the image says.
    assert reported_made_by_buildah["User"] == f"{USER}:{USER}"
    assert reported_made_by_buildah["Entrypoint"] == entry_point(target)
    assert set(reported_made_by_buildah["Env"]) >= {
        f"{key}={value}" for key, value in environment(target).items()
    }
    assert "lag" in image.say("report", "--help")
    if target == "reports":
        assert "readers" in a_report(image)
        return
    assert image.sandbox.size_bytes("/opt/popmq") < LIMIT_BYTES
    (command,) = (json.loads(rest) for rest in steps(target, "CMD"))
    assert reported_made_by_buildah["Cmd"] == command
    bill = json.loads(image.read("/opt/popmq/sbom.cdx.json"))
    assert {"popmq", "protobuf", "click"} <= {part["name"] for part in bill["components"]}
    if target == "operator":
        assert "kopf" in {part["name"] for part in bill["components"]}
        return
    ready = image.start("up", *command, "--port", "0", "--http-port", "0")
    endpoint = f"127.0.0.1:{ready['endpoint'].rpartition(':')[2]}"
    image.say("send", "hello", "one", "--endpoint", endpoint)
