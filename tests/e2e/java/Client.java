import java.io.BufferedReader;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.stream.LongStream;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.SendReceipt;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;
import org.apache.rocketmq.client.java.message.MessageViewImpl;
import org.apache.rocketmq.shaded.com.google.gson.Gson;
import org.apache.rocketmq.shaded.com.google.gson.GsonBuilder;
import org.apache.rocketmq.shaded.com.google.gson.JsonArray;
import org.apache.rocketmq.shaded.com.google.gson.JsonObject;
import org.apache.rocketmq.shaded.com.google.gson.JsonParser;

/**
 * One role of the official Java client, in a process of its own: the twin of ../python_client.py,
 * with the same commands on stdin and the same events on stdout. The second argument says whether
 * it speaks TLS ("tls"), as it does by default, or not ("plain").
 */
public final class Client {
    private static final int SENDERS = 8;
    private static final int RECEIVERS = 2;
    private static final int BATCH = 16;
    private static final Duration LONG_POLL = Duration.ofSeconds(10);
    private static final Gson GSON = new GsonBuilder().serializeNulls().disableHtmlEscaping().create();
    private static final PrintStream OUT =
            new PrintStream(new FileOutputStream(FileDescriptor.out), true, StandardCharsets.UTF_8);

    private final ClientServiceProvider provider = ClientServiceProvider.loadService();
    private final boolean tls;

    interface Commands {
        void perform(JsonObject command) throws Exception;
    }

    private Client(boolean tls) {
        this.tls = tls;
    }

    public static void main(String[] args) throws Exception {
        // The client writes its log there.
        System.setProperty("user.home", System.getenv("HOME"));
        BufferedReader lines =
                new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        JsonObject start = JsonParser.parseString(lines.readLine()).getAsJsonObject();
        Client client = new Client(args[1].equals("tls"));
        Commands commands = switch (args[0]) {
            case "producer" -> client.producer(start);
            case "simple" -> client.simple(start);
            case "push" -> client.push(start);
            case "payloads" -> payloads(start);
            case "orphans" -> client.orphans(start);
            default -> throw new IllegalArgumentException(args[0]);
        };
        emit("ready", Map.of());
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            JsonObject command = JsonParser.parseString(line).getAsJsonObject();
            if (command.get("op").getAsString().equals("stop")) break;
            commands.perform(command);
        }
        emit("stopped", Map.of());
        Runtime.getRuntime().halt(0);
    }

    private Commands producer(JsonObject start) throws Exception {
        String topic = start.get("topic").getAsString();
        Producer producer = provider.newProducerBuilder()
                .setClientConfiguration(configuration(start))
                .setTopics(topic)
                .build();
        return command -> {
            switch (command.get("op").getAsString()) {
                case "delay" -> delay(producer, topic, command);
                case "recall" -> recall(producer, topic, command);
                default -> sendAll(producer, topic, command);
            }
        };
    }

    private void sendAll(Producer producer, String topic, JsonObject command) throws Exception {
        JsonArray numbers = command.getAsJsonArray("numbers");
        AtomicInteger next = new AtomicInteger();
        CountDownLatch done = new CountDownLatch(SENDERS);
        for (int sender = 0; sender < SENDERS; sender++) {
            new Thread(() -> {
                for (int i = next.getAndIncrement(); i < numbers.size(); i = next.getAndIncrement()) {
                    send(producer, topic, numbers.get(i).getAsLong(), command);
                }
                done.countDown();
            }).start();
        }
        done.await();
        emit("done", Map.of());
    }

    private void send(Producer producer, String topic, long k, JsonObject command) {
        Payloads.Payload made = Payloads.payload(
                command.get("seed").getAsLong(), k, command.get("max_body").getAsInt());
        MessageBuilder builder = provider.newMessageBuilder()
                .setTopic(topic)
                .setBody(made.body())
                .setTag(made.tag())
                .setKeys(made.keys().toArray(String[]::new));
        made.properties().forEach(builder::addProperty);
        Message message = builder.build();
        long before = System.currentTimeMillis();
        try {
            SendReceipt receipt = producer.send(message);
            String id = receipt.getMessageId().toString();
            // The client takes its born time as it sends, and tells nobody.
            long[] born = LongStream.rangeClosed(before, System.currentTimeMillis()).toArray();
            emit("sent", Map.of("k", k, "message_id", id, "receipt_id", id, "born_ms", born));
        } catch (Exception error) {
            emit("send_failed", Map.of("k", k, "error", error.toString()));
        }
    }

    private void delay(Producer producer, String topic, JsonObject command) {
        String name = command.get("name").getAsString();
        Message message = provider.newMessageBuilder()
                .setTopic(topic)
                .setBody(name.getBytes(StandardCharsets.UTF_8))
                .setDeliveryTimestamp(command.get("deliver_at_s").getAsLong() * 1000)
                .build();
        try {
            SendReceipt receipt = producer.send(message);
            String id = receipt.getMessageId().toString();
            emit("sent", Map.of("name", name, "message_id", id, "handle", receipt.getRecallHandle()));
        } catch (Exception error) {
            emit("send_failed", Map.of("name", name, "error", error.toString()));
        }
    }

    private void recall(Producer producer, String topic, JsonObject command) {
        String name = command.get("name").getAsString();
        try {
            String handle = command.get("handle").getAsString();
            String id = producer.recallMessage(topic, handle).getMessageId().toString();
            emit("recalled", Map.of("name", name, "message_id", id));
        } catch (Exception error) {
            emit("recall_failed", Map.of("name", name, "error", error.toString()));
        }
    }

    /** Sends half messages and forgets them; asked, it commits those whose name begins so. */
    private Commands orphans(JsonObject start) throws Exception {
        String topic = start.get("topic").getAsString();
        Producer producer = provider.newProducerBuilder()
                .setClientConfiguration(configuration(start))
                .setTopics(topic)
                .setTransactionChecker(message -> {
                    String name = StandardCharsets.UTF_8.decode(message.getBody()).toString();
                    emit("checked", Map.of("name", name));
                    return name.startsWith("commit")
                            ? TransactionResolution.COMMIT
                            : TransactionResolution.ROLLBACK;
                })
                .build();
        return command -> {
            String name = command.get("name").getAsString();
            Message message = provider.newMessageBuilder()
                    .setTopic(topic)
                    .setBody(name.getBytes(StandardCharsets.UTF_8))
                    .build();
            String id =
                    producer.send(message, producer.beginTransaction()).getMessageId().toString();
            emit("sent", Map.of("name", name, "message_id", id));
        };
    }

    private Commands simple(JsonObject start) throws Exception {
        Duration invisible = Duration.ofSeconds(start.get("invisible_s").getAsLong());
        SimpleConsumer consumer = provider.newSimpleConsumerBuilder()
                .setClientConfiguration(configuration(start))
                .setConsumerGroup(start.get("group").getAsString())
                .setAwaitDuration(LONG_POLL)
                .setSubscriptionExpressions(everything(start))
                .build();
        for (int i = 0; i < RECEIVERS; i++) {
            Thread receiver = new Thread(() -> receiveForEver(consumer, invisible));
            receiver.setDaemon(true);
            receiver.start();
        }
        return Client::refuseCommand;
    }

    private void receiveForEver(SimpleConsumer consumer, Duration invisible) {
        for (;;) {
            List<MessageView> messages;
            try {
                messages = consumer.receive(BATCH, invisible);
            } catch (Exception error) {
                emit("error", Map.of("error", "receive: " + error));
                pause();
                continue;
            }
            long receivedMs = System.currentTimeMillis();
            for (MessageView message : messages) {
                boolean acked = !refused(message);
                emitDelivery(message, receivedMs, acked);
                if (acked) ack(consumer, message);
            }
        }
    }

    /** Not waited for, so that the receiver is back in its long poll at once. */
    private void ack(SimpleConsumer consumer, MessageView message) {
        consumer.ackAsync(message).exceptionally(error -> {
            emit("ack_failed", Map.of(
                    "message_id", message.getMessageId().toString(),
                    "attempt", message.getDeliveryAttempt(),
                    "error", error.toString()));
            return null;
        });
    }

    private Commands push(JsonObject start) throws Exception {
        provider.newPushConsumerBuilder()
                .setClientConfiguration(configuration(start))
                .setConsumerGroup(start.get("group").getAsString())
                .setSubscriptionExpressions(everything(start))
                .setConsumptionThreadCount(4)
                .setMessageListener(message -> {
                    boolean acked = !refused(message);
                    emitDelivery(message, System.currentTimeMillis(), acked);
                    return acked ? ConsumeResult.SUCCESS : ConsumeResult.FAILURE;
                })
                .build();
        return Client::refuseCommand;
    }

    private static Commands payloads(JsonObject start) {
        for (long k = 0; k < start.get("count").getAsLong(); k++) {
            Payloads.Payload made = Payloads.payload(
                    start.get("seed").getAsLong(), k, start.get("max_body").getAsInt());
            emit("payload", Map.of(
                    "k", k,
                    "sha256", Payloads.sha256(made.body()),
                    "size", made.body().length,
                    "keys", made.keys().stream().sorted().toList(),
                    "tag", made.tag(),
                    "properties", made.properties()));
        }
        return Client::refuseCommand;
    }

    private static void refuseCommand(JsonObject command) {
        throw new IllegalArgumentException("no such command: " + command);
    }

    private ClientConfiguration configuration(JsonObject start) {
        return ClientConfiguration.newBuilder()
                .setEndpoints(start.get("endpoint").getAsString())
                .enableSsl(tls)
                .setNamespace(start.has("namespace") ? start.get("namespace").getAsString() : "")
                .build();
    }

    private static Map<String, FilterExpression> everything(JsonObject start) {
        return Map.of(start.get("topic").getAsString(), FilterExpression.SUB_ALL);
    }

    private static boolean refused(MessageView message) {
        String k = message.getProperties().getOrDefault("k", "0");
        return message.getDeliveryAttempt() == 1 && Payloads.comesBack(Long.parseLong(k));
    }

    private static void emitDelivery(MessageView message, long receivedMs, boolean acked) {
        MessageViewImpl inner = (MessageViewImpl) message;
        ByteBuffer buffer = message.getBody();
        byte[] body = new byte[buffer.remaining()];
        buffer.get(body);
        Map<String, Object> fields = new LinkedHashMap<>();
        fields.put("message_id", message.getMessageId().toString());
        fields.put("attempt", message.getDeliveryAttempt());
        fields.put("sha256", Payloads.sha256(body));
        fields.put("size", body.length);
        fields.put("keys", message.getKeys().stream().sorted().toList());
        fields.put("tag", message.getTag().orElse(null));
        fields.put("properties", message.getProperties());
        fields.put("born_ms", message.getBornTimestamp());
        fields.put("corrupted", inner.isCorrupted());
        fields.put("delivered_ms", inner.getTransportDeliveryTimestamp().orElse(null));
        fields.put("received_ms", receivedMs);
        fields.put("acked", acked);
        fields.put("settled_ms", System.currentTimeMillis());
        emit("delivered", fields);
    }

    private static void emit(String event, Map<String, ?> fields) {
        Map<String, Object> all = new LinkedHashMap<>();
        all.put("event", event);
        all.putAll(fields);
        String line = GSON.toJson(all);
        synchronized (OUT) {
            OUT.println(line);
        }
    }

    private static void pause() {
        try {
            Thread.sleep(200);
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
        }
    }
}
