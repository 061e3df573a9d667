import java.nio.charset.StandardCharsets;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * An application as it ran at RocketMQ 4: its code names no server, so the client takes NAMESRV_ADDR.
 *
 * <p>Its first try of an order fails. It ends when its standard input does (test_migration.py).
 */
public final class Shop {
  private Shop() {}

  public static void main(String[] arguments) throws Exception {
    DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("billing");
    consumer.subscribe("orders", "*");
    consumer.subscribe("reminders", "*");
    consumer.registerMessageListener(
        (MessageListenerConcurrently)
            (messages, context) -> {
              context.setDelayLevelWhenNextConsume(1); // 1 s
              messages.forEach(Remoting::got);
              return messages.stream().anyMatch(Shop::fails)
                  ? ConsumeConcurrentlyStatus.RECONSUME_LATER
                  : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
    consumer.start();

    DefaultMQProducer producer = new DefaultMQProducer("shop");
    producer.start();
    Remoting.sent("order", producer.send(message("orders", "an order")));
    Message reminder = message("reminders", "a reminder");
    reminder.setDelayTimeLevel(2); // 5 s
    Remoting.sent("reminder", producer.send(reminder));

    while (System.in.read() >= 0) {
      // until the test closes it
    }
    producer.shutdown();
    consumer.shutdown();
    Runtime.getRuntime().halt(0); // threads of the client are no daemons
  }

  private static boolean fails(MessageExt message) {
    return message.getTopic().equals("orders") && message.getReconsumeTimes() == 0;
  }

  private static Message message(String topic, String body) {
    return new Message(topic, body.getBytes(StandardCharsets.UTF_8));
  }
}
