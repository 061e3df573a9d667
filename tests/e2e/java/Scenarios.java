import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.Set;
import java.util.TreeMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import java.util.stream.IntStream;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.FilterExpressionType;
import org.apache.rocketmq.client.apis.consumer.LitePushConsumer;
import org.apache.rocketmq.client.apis.consumer.OffsetOption;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.Transaction;
import org.apache.rocketmq.client.apis.producer.TransactionChecker;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;
import org.apache.rocketmq.shaded.com.google.gson.Gson;
import org.apache.rocketmq.shaded.com.google.gson.JsonElement;
import org.apache.rocketmq.shaded.com.google.gson.JsonObject;
import org.apache.rocketmq.shaded.com.google.gson.JsonParser;

/**
 * Scenarios of the official Java client: the twin of ../scenario_client.py, with the same question on
 * stdin and the same answers on stdout, one after the other.
 */
public final class Scenarios {
    private static final Duration INVISIBLE = Duration.ofSeconds(30);
    private static final Gson GSON = new Gson();

    private final ClientServiceProvider provider = ClientServiceProvider.loadService();
    private final ExecutorService threads = Executors.newCachedThreadPool();
    private final JsonObject start;

    private Scenarios(JsonObject start) {
        this.start = start;
    }

    public static void main(String[] args) throws Exception {
        // The client writes its log there.
        System.setProperty("user.home", System.getenv("HOME"));
        BufferedReader lines =
                new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        Scenarios all = new Scenarios(JsonParser.parseString(lines.readLine()).getAsJsonObject());
        for (JsonElement name : all.start.getAsJsonArray("run")) {
            all.report(name.getAsString());
        }
        System.out.flush();
        Runtime.getRuntime().halt(0);
    }

    private void report(String name) {
        Map<String, Object> seen = new TreeMap<>();
        try {
            seen.putAll(play(name));
        } catch (Exception error) {
            seen.put("error", error.toString());
        }
        seen.put("scenario", name);
        System.out.println(GSON.toJson(seen));
    }

    private Map<String, ?> play(String name) throws Exception {
        return switch (name) {
            case "awaits" -> awaits();
            case "large" -> large();
            case "gzip" -> Map.of("received", texts(received(consumer("gzip", "gzip", 10), 1)));
            case "many_topics" -> manyTopics();
            case "filters" -> filters();
            case "transactions" -> transactions();
            case "ranks" -> ranks();
            case "expiring" -> expiring();
            case "ordered" -> ordered();
            case "letters" -> letters();
            case "everyone" -> everyone();
            case "lites" -> lites();
            default -> throw new IllegalArgumentException(name);
        };
    }

    /** How long waits of every length took with nothing there, in seconds. */
    private Map<String, ?> awaits() throws Exception {
        Map<String, Future<Double>> waits = new TreeMap<>();
        Map<String, SimpleConsumer> consumers = new TreeMap<>();
        for (JsonElement length : start.getAsJsonArray("awaits")) {
            String name = length.getAsString();
            consumers.put(name, consumer("waits-" + name, "quiet", length.getAsInt()));
        }
        consumers.forEach((name, consumer) -> waits.put(name, threads.submit(() -> {
            long begun = System.nanoTime();
            if (!consumer.receive(1, INVISIBLE).isEmpty()) {
                throw new IllegalStateException("something came");
            }
            return (System.nanoTime() - begun) / 1e9;
        })));
        Map<String, Double> took = new TreeMap<>();
        for (Map.Entry<String, Future<Double>> one : waits.entrySet()) {
            took.put(one.getKey(), one.getValue().get());
        }
        return Map.of("took_s", took);
    }

    private Map<String, ?> large() throws Exception {
        byte[] body = new byte[start.get("large_bytes").getAsInt()];
        new Random().nextBytes(body);
        SimpleConsumer consumer = consumer("large", "large", 10);
        Producer producer = producer("large");
        producer.send(message("large", body).build());
        List<String> sums = new ArrayList<>();
        for (MessageView one : received(consumer, 1)) {
            sums.add(Payloads.sha256(bytes(one)));
        }
        return Map.of("sent", Payloads.sha256(body), "received", sums);
    }

    private Map<String, ?> manyTopics() throws Exception {
        String[] topics = IntStream.range(0, 200).mapToObj(n -> "many-" + n).toArray(String[]::new);
        long begun = System.nanoTime();
        Producer producer = producer(topics);
        double ready = (System.nanoTime() - begun) / 1e9;
        Set<String> ids = new HashSet<>();
        for (String topic : topics) {
            ids.add(producer.send(message(topic, "x").build()).getMessageId().toString());
        }
        return Map.of("ready_s", ready, "sent", ids.size());
    }

    private Map<String, ?> filters() throws Exception {
        Producer producer = producer("filtered");
        for (int number = 0; number < 20; number++) {
            producer.send(message("filtered", String.valueOf(number))
                    .setTag(number % 2 == 0 ? "even" : "odd")
                    .addProperty("number", String.valueOf(number))
                    .build());
        }
        FilterExpression tags = new FilterExpression("odd || none");
        FilterExpression sql = new FilterExpression(
                "number BETWEEN 5 AND 8 AND TAGS = 'even'", FilterExpressionType.SQL92);
        return Map.of(
                "tags", numbers(received(consumer("tags", "filtered", 5, tags), 2)),
                "sql", numbers(received(consumer("sql", "filtered", 5, sql), 2)));
    }

    private Map<String, ?> transactions() throws Exception {
        List<String> checked = new ArrayList<>();
        TransactionChecker checker = message -> {
            checked.add(text(message));
            return TransactionResolution.COMMIT;
        };
        Producer producer = provider.newProducerBuilder()
                .setClientConfiguration(configuration())
                .setTopics("halves")
                .setTransactionChecker(checker)
                .build();
        half(producer, "kept").commit();
        half(producer, "dropped").rollback();
        half(producer, "orphan");
        SimpleConsumer consumer = consumer("ends", "halves", 5);
        List<MessageView> found = new ArrayList<>();
        long until = System.nanoTime() + TimeUnit.SECONDS.toNanos(start.get("check_s").getAsLong());
        while (found.size() < 2 && System.nanoTime() < until) {
            found.addAll(received(consumer, 1));
        }
        found.addAll(received(consumer, 1));
        return Map.of("received", texts(found), "checked", checked);
    }

    private Transaction half(Producer producer, String body) throws Exception {
        Transaction transaction = producer.beginTransaction();
        producer.send(message("halves", body).build(), transaction);
        return transaction;
    }

    private Map<String, ?> ranks() throws Exception {
        Producer producer = producer("ranked");
        for (int priority : new int[] {1, 3, 2}) {
            producer.send(message("ranked", String.valueOf(priority)).setPriority(priority).build());
        }
        SimpleConsumer consumer = consumer("ranks", "ranked", 5);
        List<Integer> found = new ArrayList<>();
        for (int i = 0; i < 3; i++) {
            found.addAll(numbers(received(consumer, 1, 1)));
        }
        return Map.of("received", found);
    }

    private Map<String, ?> expiring() throws Exception {
        Producer producer = producer("expiring");
        producer.send(message("expiring", "old").addProperty("TTL_MS", "1000").build());
        producer.send(message("expiring", "stays").addProperty("TTL_MS", "600000").build());
        // Real time, which the broker measures: the first message's is over then.
        Thread.sleep(1200);
        return Map.of("received", texts(received(consumer("late", "expiring", 3), 2)));
    }

    /**
     * Messages of 20 groups. Every seventh group fails each third of its messages at first: it and
     * what the same reply has of the group behind it are to come again in a second.
     */
    private Map<String, ?> ordered() throws Exception {
        Producer producer = producer("ordered");
        for (int number = 0; number < 6; number++) {
            for (int key = 0; key < 20; key++) {
                producer.send(message("ordered", String.valueOf(number))
                        .setMessageGroup("key-" + key)
                        .build());
            }
        }
        SimpleConsumer consumer = consumer("in-order", "ordered", 5);
        Map<String, List<Integer>> acked = new TreeMap<>();
        int left = 120;
        int failed = 0;
        long until = System.nanoTime() + TimeUnit.SECONDS.toNanos(start.get("check_s").getAsLong());
        while (left > 0 && System.nanoTime() < until) {
            Set<String> stuck = new HashSet<>();
            for (MessageView one : consumer.receive(32, INVISIBLE)) {
                String key = one.getMessageGroup().orElseThrow();
                int number = Integer.parseInt(text(one));
                boolean first = one.getDeliveryAttempt() == 1;
                boolean fails = first && Integer.parseInt(key.substring(4)) % 7 == 0 && number % 3 == 0;
                if (fails || stuck.contains(key)) {
                    stuck.add(key);
                    failed++;
                    consumer.changeInvisibleDuration(one, Duration.ofSeconds(1));
                } else {
                    consumer.ack(one);
                    acked.computeIfAbsent(key, none -> new ArrayList<>()).add(number);
                    left--;
                }
            }
        }
        return Map.of("acked", acked, "failed", failed);
    }

    /** One message that a push consumer never manages: when it came, and as which attempt. */
    private Map<String, ?> letters() throws Exception {
        String sent =
                producer("letters").send(message("letters", "poison").build()).getMessageId().toString();
        List<List<Long>> deliveries = new ArrayList<>();
        CountDownLatch left = new CountDownLatch(start.get("attempts").getAsInt());
        provider.newPushConsumerBuilder()
                .setClientConfiguration(configuration())
                .setConsumerGroup("letters")
                .setSubscriptionExpressions(Map.of("letters", FilterExpression.SUB_ALL))
                .setMessageListener(message -> {
                    deliveries.add(
                            List.of((long) message.getDeliveryAttempt(), System.currentTimeMillis()));
                    left.countDown();
                    return ConsumeResult.FAILURE;
                })
                .build();
        left.await(start.get("check_s").getAsLong(), TimeUnit.SECONDS);
        return Map.of("sent", sent, "deliveries", deliveries);
    }

    /** Three instances, each with a group of its own; and one group that two more of them share. */
    private Map<String, ?> everyone() throws Exception {
        String[] groups = {"each-1", "each-2", "each-3", "shared", "shared"};
        List<SimpleConsumer> consumers = new ArrayList<>();
        for (String group : groups) {
            consumers.add(consumer(group, "everyone", 2));
        }
        Producer producer = producer("everyone");
        for (int number = 0; number < 20; number++) {
            producer.send(message("everyone", String.valueOf(number)).build());
        }
        List<Future<List<MessageView>>> found = new ArrayList<>();
        for (SimpleConsumer consumer : consumers) {
            found.add(threads.submit(() -> received(consumer, 4)));
        }
        Map<String, List<Integer>> seen = new TreeMap<>();
        for (int i = 0; i < groups.length; i++) {
            seen.computeIfAbsent(groups[i], group -> new ArrayList<>()).addAll(numbers(found.get(i).get()));
        }
        seen.values().forEach(numbers -> numbers.sort(null));
        return seen;
    }

    /** This client has push consumers of lite topics only: the first of two stands for a simple one. */
    private Map<String, ?> lites() throws Exception {
        Producer producer = producer("chats", "sessions");
        Collected first = new Collected();
        Collected told = new Collected();
        LitePushConsumer one = lite("lite-simple", "chats", first);
        LitePushConsumer other = lite("lite-push", "chats", told);
        for (String name : new String[] {"one", "two"}) {
            one.subscribeLite(name);
        }
        for (String name : new String[] {"two", "three"}) {
            other.subscribeLite(name);
        }
        for (String name : new String[] {"one", "two", "three", "four"}) {
            for (int number = 0; number < 5; number++) {
                send(producer, "chats", name, name + "-" + number);
            }
        }
        first.await(10);
        told.await(10);
        one.unsubscribeLite("one");
        send(producer, "chats", "one", "nobody's");
        send(producer, "chats", "two", "somebody's");
        first.await(11);
        told.await(11);
        Map<String, Object> seen = new TreeMap<>();
        seen.put("timed", fromATime(producer));
        seen.put("forgotten", forgotten(producer));
        // What came too much would have come meanwhile.
        seen.put("simple", first.all().subList(0, 10));
        seen.put("after", first.all().stream().skip(10).map(got -> got.get(1)).toList());
        seen.put("push", told.all());
        seen.put("too_many_topics", refused(() -> {
            for (int number = 0; number < 20; number++) {
                send(producer, "chats", "more-" + number, "x");
            }
        }));
        int quota = start.get("lite_quota").getAsInt();
        seen.put("too_many_here", refused(() -> subscribe(one, quota)));
        seen.put("too_many_there", refused(() -> subscribe(other, quota - 2)));
        // The client itself takes any name for a subscription that is not too long.
        seen.put("bad_name", refused(() -> other.subscribeLite("a b")));
        return seen;
    }

    /** What a group gets that begins at a time between two messages. */
    private List<String> fromATime(Producer producer) throws Exception {
        send(producer, "chats", "timed", "early");
        Thread.sleep(20);
        long between = System.currentTimeMillis();
        Thread.sleep(20);
        send(producer, "chats", "timed", "late");
        Collected got = new Collected();
        LitePushConsumer consumer = lite("lite-timed", "chats", got);
        consumer.subscribeLite("timed", OffsetOption.ofTimestamp(between));
        got.await(1);
        send(producer, "chats", "timed", "later");
        got.await(2);
        consumer.unsubscribeLite("timed");
        return got.all().stream().map(one -> one.get(1)).toList();
    }

    /** What the client still counts as subscribed when the time to live of one lite topic is over. */
    private List<String> forgotten(Producer producer) throws Exception {
        Collected got = new Collected();
        LitePushConsumer consumer = lite("lite-sessions", "sessions", got);
        consumer.subscribeLite("brief");
        consumer.subscribeLite("unborn");
        send(producer, "sessions", "brief", "x");
        got.await(1);
        long until = System.nanoTime() + TimeUnit.SECONDS.toNanos(start.get("check_s").getAsLong());
        while (consumer.getLiteTopicSet().size() == 2 && System.nanoTime() < until) {
            Thread.sleep(50);
        }
        List<String> left = consumer.getLiteTopicSet().stream().sorted().toList();
        consumer.unsubscribeLite("unborn");
        return left;
    }

    private LitePushConsumer lite(String group, String topic, Collected got) throws Exception {
        return provider.newLitePushConsumerBuilder()
                .setClientConfiguration(configuration())
                .setConsumerGroup(group)
                .bindTopic(topic)
                .setMessageListener(message -> {
                    got.add(List.of(message.getLiteTopic().orElse(""), text(message)));
                    return ConsumeResult.SUCCESS;
                })
                .build();
    }

    private void send(Producer producer, String topic, String liteTopic, String body) throws Exception {
        producer.send(message(topic, body).setLiteTopic(liteTopic).build());
    }

    private static void subscribe(LitePushConsumer consumer, int count) throws Exception {
        for (int number = 0; number < count; number++) {
            consumer.subscribeLite("more-" + number);
        }
    }

    private interface Work {
        void run() throws Exception;
    }

    /** The client's exception, by name, and the code that it tells. */
    private static List<Object> refused(Work work) {
        try {
            work.run();
        } catch (Exception error) {
            Matcher code = Pattern.compile("response-code=(\\d+)").matcher(String.valueOf(error.getMessage()));
            return List.of(error.getClass().getSimpleName(), code.find() ? Integer.parseInt(code.group(1)) : 0);
        }
        return List.of("", 0);
    }

    /** Lite topics and bodies of what a listener got, from any of its threads. */
    private static final class Collected {
        private final List<List<String>> got = Collections.synchronizedList(new ArrayList<>());

        void add(List<String> one) {
            synchronized (got) {
                got.add(one);
                got.notifyAll();
            }
        }

        void await(int count) throws Exception {
            long until = System.nanoTime() + TimeUnit.SECONDS.toNanos(30);
            synchronized (got) {
                while (got.size() < count) {
                    long left = TimeUnit.NANOSECONDS.toMillis(until - System.nanoTime());
                    if (left <= 0) {
                        throw new IllegalStateException(got.size() + " of " + count + " came: " + got);
                    }
                    got.wait(left);
                }
            }
        }

        List<List<String>> all() {
            synchronized (got) {
                return List.copyOf(got);
            }
        }
    }

    private Producer producer(String... topics) throws Exception {
        return provider.newProducerBuilder()
                .setClientConfiguration(configuration())
                .setTopics(topics)
                .build();
    }

    private SimpleConsumer consumer(String group, String topic, int awaitS) throws Exception {
        return consumer(group, topic, awaitS, FilterExpression.SUB_ALL);
    }

    private SimpleConsumer consumer(String group, String topic, int awaitS, FilterExpression filter)
            throws Exception {
        return provider.newSimpleConsumerBuilder()
                .setClientConfiguration(configuration())
                .setConsumerGroup(group)
                .setAwaitDuration(Duration.ofSeconds(awaitS))
                .setSubscriptionExpressions(Map.of(topic, filter))
                .build();
    }

    private static List<MessageView> received(SimpleConsumer consumer, int rounds) throws Exception {
        return received(consumer, rounds, 32);
    }

    /** What so many receives brought, acknowledged. */
    private static List<MessageView> received(SimpleConsumer consumer, int rounds, int limit)
            throws Exception {
        List<MessageView> found = new ArrayList<>();
        for (int round = 0; round < rounds; round++) {
            for (MessageView one : consumer.receive(limit, INVISIBLE)) {
                consumer.ack(one);
                found.add(one);
            }
        }
        return found;
    }

    private MessageBuilder message(String topic, String body) {
        return message(topic, body.getBytes(StandardCharsets.UTF_8));
    }

    private MessageBuilder message(String topic, byte[] body) {
        return provider.newMessageBuilder().setTopic(topic).setBody(body);
    }

    private ClientConfiguration configuration() {
        return ClientConfiguration.newBuilder()
                .setEndpoints(start.get("endpoint").getAsString())
                .enableSsl(false)
                .build();
    }

    private static List<String> texts(List<MessageView> messages) {
        return messages.stream().map(Scenarios::text).sorted().toList();
    }

    private static List<Integer> numbers(List<MessageView> messages) {
        return messages.stream().map(one -> Integer.valueOf(text(one))).sorted().toList();
    }

    private static String text(MessageView message) {
        return new String(bytes(message), StandardCharsets.UTF_8);
    }

    private static byte[] bytes(MessageView message) {
        ByteBuffer buffer = message.getBody();
        byte[] body = new byte[buffer.remaining()];
        buffer.get(body);
        return body;
    }
}
