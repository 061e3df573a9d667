import java.io.BufferedReader;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.shaded.com.google.gson.Gson;
import org.apache.rocketmq.shaded.com.google.gson.JsonObject;
import org.apache.rocketmq.shaded.com.google.gson.JsonParser;

/**
 * An official Java client that sends, delays, receives and acknowledges without a pause: the twin of
 * ../flow_client.py, with the same commands and events. It is a SimpleConsumer, because this client's
 * push consumer tells nobody how its acknowledgements ended.
 */
public final class Flow {
    private static final int SENDERS = 4;
    private static final int DELAYED = 5;
    private static final int RECEIVERS = 2;
    private static final int BATCH = 16;
    private static final Duration LONG_POLL = Duration.ofSeconds(2);
    private static final Gson GSON = new Gson();
    private static final PrintStream OUT =
            new PrintStream(new FileOutputStream(FileDescriptor.out), true, StandardCharsets.UTF_8);

    private static int number = 0;

    private final ClientServiceProvider provider = ClientServiceProvider.loadService();
    private final JsonObject start;
    private final Producer producer;
    private final SimpleConsumer consumer;
    private final List<Thread> senders = new ArrayList<>();
    private volatile boolean sending = true;

    private Flow(JsonObject start) throws Exception {
        this.start = start;
        ClientConfiguration configuration = ClientConfiguration.newBuilder()
                .setEndpoints(start.get("endpoint").getAsString())
                .enableSsl(false)
                .build();
        FilterExpression all = FilterExpression.SUB_ALL;
        consumer = provider.newSimpleConsumerBuilder()
                .setClientConfiguration(configuration)
                .setConsumerGroup(start.get("group").getAsString())
                .setAwaitDuration(LONG_POLL)
                .setSubscriptionExpressions(Map.of(topic(), all, later(), all))
                .build();
        producer = provider.newProducerBuilder()
                .setClientConfiguration(configuration)
                .setTopics(topic(), later())
                .build();
    }

    public static void main(String[] args) throws Exception {
        // The client writes its log there.
        System.setProperty("user.home", System.getenv("HOME"));
        BufferedReader lines =
                new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        Flow flow = new Flow(JsonParser.parseString(lines.readLine()).getAsJsonObject());
        for (int i = 0; i < RECEIVERS; i++) {
            run(flow::receiveForEver);
        }
        emit("ready", Map.of());
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            switch (JsonParser.parseString(line).getAsJsonObject().get("op").getAsString()) {
                case "go" -> flow.go();
                case "quiet" -> flow.quiet();
                default -> Runtime.getRuntime().halt(0);
            }
        }
        Runtime.getRuntime().halt(0);
    }

    private void go() {
        for (int sender = 0; sender < SENDERS; sender++) {
            int first = sender;
            senders.add(run(() -> sendForEver(first)));
        }
    }

    private void quiet() throws InterruptedException {
        sending = false;
        for (Thread sender : senders) {
            sender.join();
        }
        emit("done", Map.of());
    }

    private void sendForEver(int first) {
        long pauseMs = start.has("pause_s") ? (long) (1000 * start.get("pause_s").getAsDouble()) : 50;
        for (int k = first; sending; k += SENDERS) {
            send(k);
            pause(pauseMs);
        }
    }

    private void send(int k) {
        String name = (start.has("name") ? start.get("name").getAsString() : "java") + "-" + k;
        boolean delayed = k % DELAYED == 0;
        long dueMs = delayed ? System.currentTimeMillis() + 1000 + 1000 * (k / DELAYED % 4) : 0;
        MessageBuilder builder = provider.newMessageBuilder()
                .setTopic(delayed ? later() : topic())
                .setBody(name.getBytes(StandardCharsets.UTF_8));
        if (delayed) {
            builder.setDeliveryTimestamp(dueMs);
        }
        long begunMs = System.currentTimeMillis();
        try {
            producer.send(builder.build());
            emit("sent", Map.of("name", name, "begun_ms", begunMs, "due_ms", dueMs));
        } catch (Exception error) {
            emit("send_failed", Map.of("name", name, "error", error.toString()));
        }
    }

    private void receiveForEver() {
        Duration invisible = Duration.ofSeconds(start.get("invisible_s").getAsLong());
        for (;;) {
            List<MessageView> messages = List.of();
            try {
                messages = consumer.receive(BATCH, invisible);
            } catch (Exception error) {
                emit("error", Map.of("error", "receive: " + error));
                pause(100);
            }
            for (MessageView message : messages) {
                String name = StandardCharsets.UTF_8.decode(message.getBody()).toString();
                emit("seen", Map.of("name", name, "attempt", message.getDeliveryAttempt()));
                consumer.ackAsync(message).whenComplete((done, error) -> {
                    if (error == null) {
                        emit("acked", Map.of("name", name));
                    } else {
                        emit("ack_failed", Map.of("name", name, "error", error.toString()));
                    }
                });
            }
        }
    }

    private String topic() {
        return start.get("topic").getAsString();
    }

    private String later() {
        return start.get("later").getAsString();
    }

    private static Thread run(Runnable work) {
        Thread thread = new Thread(work);
        thread.setDaemon(true);
        thread.start();
        return thread;
    }

    private static void pause(long ms) {
        try {
            Thread.sleep(ms);
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
        }
    }

    private static void emit(String event, Map<String, ?> fields) {
        Map<String, Object> all = new LinkedHashMap<>();
        all.put("event", event);
        synchronized (OUT) {
            all.put("n", number++);
            all.put("at_ms", System.currentTimeMillis());
            all.putAll(fields);
            OUT.println(GSON.toJson(all));
        }
    }
}
