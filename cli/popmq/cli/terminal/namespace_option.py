"""`--namespace`: the commands ask for whole names, as brokers know them, and print those."""

from types import SimpleNamespace

from popmq.common.errors import Code, Refused

# What arguments call a topic or a consumer group.
FIELDS = ("topic", "group", "name")


def in_namespace(args: SimpleNamespace) -> None:
    """Make the names whole.  Raises BAD_REQUEST for what can be no namespace."""
    from popmq.common.namespaces import check_namespace, wrap_namespace

    check_namespace(args.namespace)
    for field in FIELDS:
        # An empty name means that none was given.
        if (name := getattr(args, field, None)) and isinstance(name, str):
            setattr(args, field, wrap_namespace(args.namespace, name))


def belongs(args: SimpleNamespace, *names: str) -> bool:
    """Whether one of these is a name of the namespace; without one everything belongs."""
    if not args.namespace:
        return True
    from popmq.common.namespaces import without_namespace

    return any(without_namespace(args.namespace, name) for name in names)


def need_topic(args: SimpleNamespace) -> None:
    """For what brokers add up over all topics."""
    if args.namespace and not args.topic:
        raise Refused(Code.BAD_REQUEST, f"--namespace {args.namespace} needs --topic T here")
