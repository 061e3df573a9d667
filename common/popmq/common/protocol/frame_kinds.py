"""The kinds of frames: what one process asks of another (docs/concepts/frames.md).

Each kind is sent by the first, answered by the second.  "Appends" means that the reply leaves
when its records are confirmed; "reads" that the request may wait for the disk, on another thread;
"waits" that the answer may come as late as the request allows.  Everything else is answered from
memory.  A broker serves them in handlers/registry.py (PUT, POP and ACK in handlers/server.py), a
master's slaves in ha/replication_server.py, a controller in controller.py.

Any process to any other:
    HELLO               the first frame of a connection, both ways: the versions
    REPLY, ERROR        the answer to a request, by its number
    CANCEL              the sender no longer wants that answer; none comes
    PROOF               that the sender holds the cluster's secret; the second frame, both ways

Proxy to the master of a broker group, for clients:
    PUT                 store messages                  appends
    POP                 receive                         appends check points; reads, waits
                        with limit 0: is there anything waits
    ACK                 end deliveries                  appends, once a group commit
    CHANGE              another invisible time          appends
    CLIENTS             who is connected, who left      appends if deliveries are released
    SYNC_LITE           subscriptions to lite topics    appends; reads for a start at a time
    REJECT              dead letter now                 appends; reads
    RECALL, RESCHEDULE  a pending timer                 appends; reads
    END_TRANSACTION     commit or roll back             appends; reads
    CHECKS              transactions to ask about       waits; the checks append
    PULL                read from an offset             reads, waits
    UPDATE_OFFSET       of a pull consumer              appends
    GET_OFFSET          of a pull consumer              nothing
    QUERY_OFFSET        the oldest, the end, of a time  reads for a time
    READ_MESSAGE        by its position in the log      reads
    SEND_BACK           a message that was pulled       appends
    MEMBERS             of groups that share queues out  waits
    LEASE               queues that are processed in order  the SyncStateSet is asked who leads
    ASK_CLIENT          a client of another proxy       waits
    CLIENT_REQUESTS     of other proxies to own clients  waits

Proxy to master, for administrators and reports:
    CREATE_, ALTER_, DELETE_TOPIC and _GROUP  appends; creating and deleting wait for the copies
    DESCRIBE_TOPIC      appends if it makes the topic by itself
    DESCRIBE_GROUP, LIST_TOPICS, LIST_GROUPS  nothing
    FIND_MESSAGES       by id, key, offset or time      reads, on the loop
    EXPLAIN             what became of a message        reads
    LAG                 what each group has to read     reads for ages
    TIME_SPANS          when queues' messages came      reads
    LIST_CLIENTS        that proxies have described     nothing
    RESET_OFFSET        of a group                      appends; reads for a time
    LIST_DEAD_LETTERS   a piece of them                 reads
    REDRIVE             a piece of them                 appends; reads
    UNPARK              resume or skip a message group  appends
    LIST_TIMERS, FORECAST_TIMERS                        reads
    DRAIN               a broker group hands on timers  appends unless it only looks
    DESCRIBE_TABLES, READ_RAW  what reports read        reads, a bounded share of the disk
    NAMES               of ids                          nothing
    DESCRIBE_SETTINGS   what the process runs with      nothing; of controllers too
    FOLLOW_USERS        to the owner: users, secrets sealed  waits
    CHANGE_USER         to the owner                    appends
    ROTATE_KEYS         another key for handles         appends unless it only looks

To controllers:
    REGISTER            broker: its state, its heartbeat    writes the group's record if it changes
    ALTER_SYNC_STATE_SET  master: another SyncStateSet      writes the group's record
    WATCH_GROUP         broker: who leads                   waits
    ROUTES              proxy: where the masters are        waits
    LIST_REPLICAS       proxy, operator                     nothing
    FAILOVER            proxy, operator, a master that stops  writes the group's record; waits

Controller to a broker (node/broker_node.py):
    HAND_OVER           admit nothing more, let another lead  waits until it is caught up
    DESCRIBE_ROLE       what it is now                        nothing

Slave to its master:
    HANDSHAKE           where their logs part               nothing
    FETCH               the log's next bytes                reads, waits
    ACKED               up to where it is on the slave's disk  may confirm what waits
    READ_SNAPSHOT       a piece of the newest snapshot      reads
    TIMER_CHECK_POINT   how far timers have fired           nothing

Between masters of broker groups:
    COPY_META           to the owner: its topics and groups  appends if it makes them; waits
    TAKE_TIMERS         from a group that is drained         appends
"""

from enum import IntEnum


class Kind(IntEnum):
    """Second byte of a frame's header (docs/concepts/frames.md)."""

    HELLO = 1
    REPLY = 2
    ERROR = 3
    CANCEL = 4
    PROOF = 5
    PUT = 16
    POP = 17
    ACK = 18
    CHANGE = 19
    CLIENTS = 20
    LIST_CLIENTS = 21
    DESCRIBE_SETTINGS = 22
    FOLLOW_USERS = 23
    CHANGE_USER = 24
    ROTATE_KEYS = 25
    REJECT = 28
    DESCRIBE_TOPIC = 32
    CREATE_TOPIC = 33
    ALTER_TOPIC = 34
    DELETE_TOPIC = 35
    LIST_TOPICS = 36
    DESCRIBE_GROUP = 37
    CREATE_GROUP = 38
    ALTER_GROUP = 39
    DELETE_GROUP = 40
    LIST_GROUPS = 41
    FIND_MESSAGES = 42
    RECALL = 43
    RESCHEDULE = 44
    LIST_TIMERS = 45
    FORECAST_TIMERS = 46
    TIME_SPANS = 47
    EXPLAIN = 48
    LAG = 49
    RESET_OFFSET = 50
    LIST_DEAD_LETTERS = 51
    REDRIVE = 52
    DESCRIBE_TABLES = 53
    READ_RAW = 54
    NAMES = 55
    UNPARK = 56
    DRAIN = 57
    END_TRANSACTION = 58
    CHECKS = 59
    PULL = 60
    UPDATE_OFFSET = 61
    GET_OFFSET = 62
    QUERY_OFFSET = 63
    REGISTER = 64
    ROUTES = 65
    ALTER_SYNC_STATE_SET = 66
    WATCH_GROUP = 67
    LIST_REPLICAS = 68
    FAILOVER = 69
    HANDSHAKE = 80
    FETCH = 81
    ACKED = 82
    READ_SNAPSHOT = 83
    TIMER_CHECK_POINT = 84
    HAND_OVER = 85
    DESCRIBE_ROLE = 86
    COPY_META = 87
    SYNC_LITE = 88
    TAKE_TIMERS = 89
    READ_MESSAGE = 90
    SEND_BACK = 91
    MEMBERS = 92
    LEASE = 93
    ASK_CLIENT = 94
    CLIENT_REQUESTS = 95


# Requests that change nothing: to ask again does no harm.
LOOKS = frozenset(
    {
        Kind.LIST_TOPICS,
        Kind.DESCRIBE_GROUP,
        Kind.LIST_GROUPS,
        Kind.FIND_MESSAGES,
        Kind.LIST_TIMERS,
        Kind.FORECAST_TIMERS,
        Kind.TIME_SPANS,
        Kind.EXPLAIN,
        Kind.LAG,
        Kind.LIST_DEAD_LETTERS,
        Kind.DESCRIBE_TABLES,
        Kind.READ_RAW,
        Kind.READ_MESSAGE,
        Kind.NAMES,
        Kind.ROUTES,
        Kind.LIST_REPLICAS,
        Kind.DESCRIBE_SETTINGS,
        Kind.LIST_CLIENTS,
        Kind.FOLLOW_USERS,
    }
)
