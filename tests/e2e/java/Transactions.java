import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.HashSet;
import java.util.Set;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.Transaction;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;
import org.apache.rocketmq.shaded.com.google.gson.JsonElement;
import org.apache.rocketmq.shaded.com.google.gson.JsonObject;
import org.apache.rocketmq.shaded.com.google.gson.JsonParser;

/**
 * A producer of transactions with the official Java client: the twin of ../transaction_client.py, with
 * the same arguments and journal. What becomes of a number is in a file, its "database".
 */
public final class Transactions {
    private static final int WORKERS = 4;
    private static final long PAUSE_MS = 300; // after a failure: something is away

    private final ClientServiceProvider provider = ClientServiceProvider.loadService();
    private final String endpoint;
    private final String topic;
    private final Path journal;
    private final Set<Integer> committed;
    private final Set<Integer> forgotten;

    private Transactions(String endpoint, String topic, Path journal, JsonObject decided) {
        this.endpoint = endpoint;
        this.topic = topic;
        this.journal = journal;
        committed = numbers(decided, "committed");
        forgotten = numbers(decided, "forgotten");
    }

    public static void main(String[] args) throws Exception {
        // The client writes its log there.
        System.setProperty("user.home", System.getenv("HOME"));
        JsonObject decided =
                JsonParser.parseString(Files.readString(Path.of(args[5]))).getAsJsonObject();
        Transactions all = new Transactions(args[0], args[1], Path.of(args[2]), decided);
        all.run(Integer.parseInt(args[3]), Integer.parseInt(args[4]));
        // To be asked about orphans until it is killed, or its stdin ends.
        while (System.in.read() >= 0) {}
        Runtime.getRuntime().halt(0);
    }

    private void run(int first, int end) throws Exception {
        Producer producer = started();
        System.out.println("ready");
        AtomicInteger next = new AtomicInteger(first);
        CountDownLatch left = new CountDownLatch(WORKERS);
        for (int worker = 0; worker < WORKERS; worker++) {
            new Thread(() -> {
                for (int k = next.getAndIncrement(); k < end; k = next.getAndIncrement()) {
                    one(producer, k);
                }
                left.countDown();
            }).start();
        }
        left.await();
        System.out.println("done");
    }

    private Producer started() {
        ClientConfiguration configuration = ClientConfiguration.newBuilder()
                .setEndpoints(endpoint)
                .enableSsl(false)
                .build();
        for (;;) {
            try {
                return provider.newProducerBuilder()
                        .setClientConfiguration(configuration)
                        .setTopics(topic)
                        .setTransactionChecker(this::check)
                        .build();
            } catch (Exception error) {
                pause();
            }
        }
    }

    private TransactionResolution check(MessageView message) {
        String name = StandardCharsets.UTF_8.decode(message.getBody()).toString();
        return committed.contains(Integer.valueOf(name))
                ? TransactionResolution.COMMIT
                : TransactionResolution.ROLLBACK;
    }

    private void one(Producer producer, int number) {
        say("tried", number);
        try {
            Transaction transaction = producer.beginTransaction();
            byte[] body = String.valueOf(number).getBytes(StandardCharsets.UTF_8);
            producer.send(
                    provider.newMessageBuilder().setTopic(topic).setBody(body).build(), transaction);
            say("sent", number);
            if (forgotten.contains(number)) {
                return;
            }
            if (committed.contains(number)) {
                transaction.commit();
            } else {
                transaction.rollback();
            }
            say("ended", number);
        } catch (Exception error) {
            say("failed", number);
            pause();
        }
    }

    private synchronized void say(String what, int number) {
        try {
            Files.writeString(
                    journal,
                    what + " " + number + "\n",
                    StandardOpenOption.CREATE,
                    StandardOpenOption.APPEND);
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    private static Set<Integer> numbers(JsonObject decided, String name) {
        Set<Integer> found = new HashSet<>();
        for (JsonElement number : decided.getAsJsonArray(name)) {
            found.add(number.getAsInt());
        }
        return found;
    }

    private static void pause() {
        try {
            Thread.sleep(PAUSE_MS);
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
        }
    }
}
