import java.lang.reflect.Method;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Collection;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Scenarios of the official Java client over Remoting: ADDRESS SCENARIO ARGUMENT...
 *
 * <p>What a scenario saw leaves as JSON lines on stdout; test_remoting_java.py judges it.
 */
public final class Remoting {
  private static String address;

  private Remoting() {}

  public static void main(String[] arguments) throws Exception {
    address = arguments[0];
    try {
      run(arguments);
    } catch (Throwable error) {
      emit("event", "error", "error", error.toString());
    }
    System.out.flush();
    Runtime.getRuntime().halt(0); // threads of the client are no daemons
  }

  private static void run(String[] arguments) throws Exception {
    switch (arguments[1]) {
      case "send" -> send(arguments[2]);
      case "order" -> order(arguments[2]);
      case "delay" -> delay(arguments[2]);
      case "refused" -> refused(arguments[2]);
      case "find" -> find(arguments[2], arguments[3]);
      case "ask" -> ask(arguments[2], arguments[3]);
      case "answer" -> answer(arguments[2], arguments[3]);
      case "transaction" -> transaction(arguments);
      case "push" -> push(arguments, false);
      case "broadcast" -> push(arguments, true);
      case "orderly" -> push(arguments, false);
      case "pop" -> push(arguments, false);
      case "pull" -> pull(arguments[2], arguments[3]);
      case "lite" -> lite(arguments[2], arguments[3]);
      default -> throw new IllegalArgumentException(arguments[1]);
    }
  }

  // -- producers

  private static void send(String topic) throws Exception {
    DefaultMQProducer producer = producer("makers");
    Message message = message(topic, "plain");
    message.setTags("red");
    message.setKeys(List.of("order-1", "order-2"));
    message.putUserProperty("size", "9");
    message.setFlag(7);
    sent("plain", producer.send(message));
    sent("again", producer.send(message)); // the same object, and so the same id

    CountDownLatch answered = new CountDownLatch(1);
    producer.send(
        message(topic, "async"),
        new SendCallback() {
          @Override
          public void onSuccess(SendResult result) {
            sent("async", result);
            answered.countDown();
          }

          @Override
          public void onException(Throwable error) {
            emit("event", "error", "error", error.toString());
            answered.countDown();
          }
        });
    if (!answered.await(10, TimeUnit.SECONDS)) {
      throw new IllegalStateException("the asynchronous send was not answered");
    }
    producer.sendOneway(message(topic, "one-way"));

    List<Message> batch = new ArrayList<>();
    for (int number = 0; number < 3; number++) {
      Message member = message(topic, "batch-" + number);
      member.setTags("blue");
      batch.add(member);
    }
    sent("batch", producer.send(batch));
    sent("large", producer.send(message(topic, "large ".repeat(20_000)))); // compressed
    producer.shutdown();
  }

  private static void order(String topic) throws Exception {
    DefaultMQProducer producer = producer("makers");
    for (int number = 0; number < 10; number++) {
      Message message = message(topic, "step-" + number);
      sent("order", producer.send(message, (queues, ignored, key) -> queues.get((int) key), 2));
    }
    producer.shutdown();
  }

  private static void delay(String topic) throws Exception {
    DefaultMQProducer producer = producer("makers");
    Message level = message(topic, "level");
    level.setDelayTimeLevel(2); // 5 s
    sent("level", producer.send(level));
    Message timer = message(topic, "timer");
    MessageAccessor.putProperty(timer, "TIMER_DELAY_MS", "1500");
    sent("timer", producer.send(timer));
    Message exact = message(topic, "exact");
    MessageAccessor.putProperty(
        exact, "TIMER_DELIVER_MS", String.valueOf(System.currentTimeMillis() + 2_000));
    sent("exact", producer.send(exact));
    producer.shutdown();
  }

  private static void refused(String topic) throws Exception {
    DefaultMQProducer producer = producer("makers");
    try {
      Message message = message(topic, "x");
      message.setDelayTimeLevel(1);
      sent("refused", producer.send(message));
    } catch (Exception error) {
      emit("event", "refused", "why", error.toString());
    }
    producer.shutdown();
  }

  /**
   * GROUP TOPIC NAME...: a half message for each name, which says how it ends; at its first check
   * "later" is committed and "never" rolled back. Runs until stdin ends.
   */
  private static void transaction(String[] arguments) throws Exception {
    TransactionMQProducer producer = new TransactionMQProducer(arguments[2]);
    prepare(producer);
    producer.setTransactionListener(
        new TransactionListener() {
          @Override
          public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
            return state(new String(message.getBody(), StandardCharsets.UTF_8));
          }

          @Override
          public LocalTransactionState checkLocalTransaction(MessageExt message) {
            emit("event", "check", "body", body(message), "id", message.getTransactionId());
            return body(message).startsWith("later")
                ? LocalTransactionState.COMMIT_MESSAGE
                : LocalTransactionState.ROLLBACK_MESSAGE;
          }
        });
    producer.start();
    for (int at = 4; at < arguments.length; at++) {
      Message message = message(arguments[3], arguments[at]);
      message.putUserProperty("CHECK_IMMUNITY_TIME_IN_SECONDS", "1");
      sent(arguments[at], producer.sendMessageInTransaction(message, null));
    }
    emit("event", "started");
    while (System.in.read() >= 0) {
      // until the test closes it
    }
    producer.shutdown();
    emit("event", "stopped");
  }

  /** TOPIC KEY: what the client finds by the key, and by the ids of what it found. */
  private static void find(String topic, String key) throws Exception {
    DefaultMQProducer producer = producer("finders");
    List<MessageExt> messages =
        producer.queryMessage(topic, key, 32, 0, Long.MAX_VALUE).getMessageList();
    for (MessageExt message : messages) {
      got(message);
      MessageExt viewed = producer.viewMessage(topic, message.getMsgId());
      emit("event", "viewed", "id", viewed.getMsgId(), "body", body(viewed));
    }
    for (MessageQueue queue : producer.fetchPublishMessageQueues(topic)) {
      long oldest = producer.earliestMsgStoreTime(queue);
      emit("event", "oldest", "broker", queue.getBrokerName(), "time", String.valueOf(oldest));
    }
    producer.shutdown();
  }

  /** Sends a request and waits for the reply of whoever consumes it. Runs until stdin ends. */
  private static void ask(String topic, String body) throws Exception {
    DefaultMQProducer producer = producer("askers");
    Message reply = producer.request(message(topic, body), 30_000);
    emit("event", "reply", "body", new String(reply.getBody(), StandardCharsets.UTF_8));
    while (System.in.read() >= 0) {
      // until the test closes it: the client has still to confirm the reply
    }
    producer.shutdown();
  }

  /** GROUP TOPIC: replies to every request until stdin ends. */
  private static void answer(String group, String topic) throws Exception {
    DefaultMQProducer producer = producer("repliers");
    DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
    consumer.setNamesrvAddr(address);
    consumer.setMqClientApiTimeout(20_000);
    consumer.subscribe(topic, "*");
    consumer.registerMessageListener(
        (MessageListenerConcurrently)
            (messages, context) -> {
              for (MessageExt message : messages) {
                try {
                  byte[] body = ("re: " + body(message)).getBytes(StandardCharsets.UTF_8);
                  Message reply = MessageUtil.createReplyMessage(message, body);
                  emit("event", "answered", "status", producer.send(reply).getSendStatus().name());
                } catch (Exception error) {
                  emit("event", "error", "error", error.toString());
                }
              }
              return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
    consumer.start();
    emit("event", "started");
    while (System.in.read() >= 0) {
      // until the test closes it
    }
    consumer.shutdown();
    producer.shutdown();
    emit("event", "stopped");
  }

  private static LocalTransactionState state(String body) {
    if (body.startsWith("commit")) {
      return LocalTransactionState.COMMIT_MESSAGE;
    }
    return body.startsWith("rollback")
        ? LocalTransactionState.ROLLBACK_MESSAGE
        : LocalTransactionState.UNKNOW;
  }

  // -- consumers

  /** GROUP TOPIC EXPRESSION: consumes until stdin ends; a body that starts with "bad" fails. */
  private static void push(String[] arguments, boolean broadcast) throws Exception {
    DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(arguments[2]);
    consumer.setNamesrvAddr(address);
    consumer.setMqClientApiTimeout(20_000);
    if (broadcast) {
      broadcast(consumer);
    }
    consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
    if (arguments.length > 5) {
      consumer.setMaxReconsumeTimes(Integer.parseInt(arguments[5]));
    }
    if (arguments[1].equals("pop")) { // the method is new in 5
      Method method = consumer.getClass().getMethod("setClientRebalance", boolean.class);
      method.invoke(consumer, false);
    }
    String expression = arguments[4];
    if (expression.startsWith("sql:")) {
      consumer.subscribe(arguments[3], MessageSelector.bySql(expression.substring(4)));
    } else {
      consumer.subscribe(arguments[3], expression);
    }
    if (arguments[1].equals("orderly")) {
      consumer.registerMessageListener(
          (MessageListenerOrderly)
              (messages, context) -> {
                messages.forEach(Remoting::got);
                return ConsumeOrderlyStatus.SUCCESS;
              });
    } else {
      // The first level of a pop consumer is 0 (10 s), that of the others 1 (1 s).
      consumer.registerMessageListener(concurrently(arguments[1].equals("pop") ? 0 : 1));
    }
    consumer.start();
    emit("event", "started");
    while (System.in.read() >= 0) {
      // until the test closes it
    }
    consumer.shutdown();
    emit("event", "stopped");
  }

  private static MessageListenerConcurrently concurrently(int level) {
    return
            (messages, context) -> {
              boolean bad = false;
              for (MessageExt message : messages) {
                got(message);
                bad |= body(message).startsWith("bad");
              }
              context.setDelayLevelWhenNextConsume(level);
              return bad
                  ? ConsumeConcurrentlyStatus.RECONSUME_LATER
                  : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            };
  }

  /** The enum is in another package in 4.9 than in 5. */
  @SuppressWarnings({"unchecked", "rawtypes"})
  private static void broadcast(DefaultMQPushConsumer consumer) throws Exception {
    for (Method method : DefaultMQPushConsumer.class.getMethods()) {
      if (method.getName().equals("setMessageModel")) {
        Class model = method.getParameterTypes()[0];
        method.invoke(consumer, Enum.valueOf(model, "BROADCASTING"));
      }
    }
  }

  /**
   * The deprecated consumer, whose application names offsets: every queue from its beginning, what
   * starts with "bad" goes back to the group, and the offsets are written.
   */
  @SuppressWarnings("deprecation")
  private static void pull(String group, String topic) throws Exception {
    DefaultMQPullConsumer consumer = new DefaultMQPullConsumer(group);
    consumer.setNamesrvAddr(address);
    consumer.setMqClientApiTimeout(20_000);
    consumer.start();
    for (MessageQueue queue : consumer.fetchSubscribeMessageQueues(topic)) {
      long offset = consumer.minOffset(queue);
      PullResult result = consumer.pull(queue, "*", offset, 3);
      while (result.getPullStatus() == PullStatus.FOUND) {
        for (MessageExt message : result.getMsgFoundList()) {
          got(message);
          if (body(message).startsWith("bad")) {
            consumer.sendMessageBack(message, 1, queue.getBrokerName()); // 1 s
          }
        }
        offset = result.getNextBeginOffset();
        result = consumer.pull(queue, "*", offset, 3);
      }
      emit("event", "ended", "status", result.getPullStatus().name());
      consumer.updateConsumeOffset(queue, offset);
      long committed = -1;
      for (int tries = 0; tries < 100 && committed != offset; tries++) {
        consumer.getOffsetStore().persist(queue); // one-way, as the client does each five seconds
        committed = consumer.fetchConsumeOffset(queue, true);
      }
      emit(
          "event", "committed",
          "queue", String.valueOf(queue.getQueueId()),
          "broker", queue.getBrokerName(),
          "offset", String.valueOf(committed));
    }
    consumer.shutdown();
  }

  /** Every queue of the topic from its beginning, without balancing. */
  private static void lite(String group, String topic) throws Exception {
    DefaultLitePullConsumer consumer = new DefaultLitePullConsumer(group);
    consumer.setNamesrvAddr(address);
    consumer.setMqClientApiTimeout(20_000);
    consumer.setAutoCommit(false);
    consumer.start();
    Collection<MessageQueue> queues = consumer.fetchMessageQueues(topic);
    consumer.assign(queues);
    for (MessageQueue queue : queues) {
      consumer.seekToBegin(queue);
    }
    int quiet = 0;
    while (quiet < 3) {
      List<MessageExt> messages = consumer.poll(1_000);
      quiet = messages.isEmpty() ? quiet + 1 : 0;
      messages.forEach(Remoting::got);
    }
    consumer.commitSync();
    for (MessageQueue queue : queues) {
      emit(
          "event", "committed",
          "queue", String.valueOf(queue.getQueueId()),
          "broker", queue.getBrokerName(),
          "offset", String.valueOf(consumer.committed(queue)));
    }
    consumer.shutdown();
  }

  private static String body(MessageExt message) {
    return new String(message.getBody(), StandardCharsets.UTF_8);
  }

  static void got(MessageExt message) {
    emit(
        "event", "got",
        "topic", message.getTopic(),
        "id", message.getMsgId(),
        "body", body(message),
        "tag", message.getTags(),
        "keys", message.getKeys(),
        "size", message.getUserProperty("size"),
        "flag", String.valueOf(message.getFlag()),
        "times", String.valueOf(message.getReconsumeTimes()),
        "queue", String.valueOf(message.getQueueId()),
        "broker", message.getBrokerName(),
        "offset", String.valueOf(message.getQueueOffset()));
  }

  private static DefaultMQProducer producer(String group) throws Exception {
    DefaultMQProducer producer = new DefaultMQProducer(group);
    prepare(producer);
    producer.start();
    return producer;
  }

  private static void prepare(DefaultMQProducer producer) {
    producer.setNamesrvAddr(address);
    // The machine may be slow: the default of 3 s is short for a cold virtual machine.
    producer.setMqClientApiTimeout(20_000);
    producer.setSendMsgTimeout(20_000);
  }

  private static Message message(String topic, String body) {
    return new Message(topic, body.getBytes(StandardCharsets.UTF_8));
  }

  static void sent(String name, SendResult result) {
    emit(
        "event", "sent",
        "name", name,
        "status", result.getSendStatus().name(),
        "id", result.getMsgId(),
        "offset_id", result.getOffsetMsgId(),
        "broker", result.getMessageQueue().getBrokerName(),
        "queue", String.valueOf(result.getMessageQueue().getQueueId()),
        "offset", String.valueOf(result.getQueueOffset()));
  }

  // -- lines of JSON

  static synchronized void emit(String... pairs) {
    Map<String, String> fields = new TreeMap<>();
    for (int at = 0; at < pairs.length; at += 2) {
      fields.put(pairs[at], pairs[at + 1]);
    }
    StringBuilder line = new StringBuilder("{");
    for (Map.Entry<String, String> field : fields.entrySet()) {
      line.append(line.length() > 1 ? "," : "").append(quoted(field.getKey())).append(":");
      line.append(quoted(field.getValue()));
    }
    System.out.println(line.append("}"));
  }

  private static String quoted(String text) {
    StringBuilder quoted = new StringBuilder("\"");
    for (char letter : String.valueOf(text).toCharArray()) {
      if (letter == '"' || letter == '\\') {
        quoted.append('\\').append(letter);
      } else if (letter < ' ') {
        quoted.append(String.format("\\u%04x", (int) letter));
      } else {
        quoted.append(letter);
      }
    }
    return quoted.append('"').toString();
  }
}
