// Scenarios of the official Go client over Remoting: ADDRESS SCENARIO ARGUMENT...
//
// What a scenario saw leaves as JSON lines on stdout, with the names that
// java_remoting/Remoting.java uses; test_remoting_go.py judges it.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
)

var (
	address string
	output  sync.Mutex
)

func main() {
	address = os.Args[1]
	if err := run(os.Args[2:]); err != nil {
		emit(map[string]string{"event": "error", "error": err.Error()})
	}
}

func run(arguments []string) error {
	switch arguments[0] {
	case "send":
		return send(arguments[1])
	case "transaction":
		return transaction(arguments)
	case "push", "orderly":
		return push(arguments)
	}
	return fmt.Errorf("no scenario is called %s", arguments[0])
}

// -- producers

func send(topic string) error {
	made, err := rocketmq.NewProducer(
		producer.WithGroupName("go-makers"),
		producer.WithNameServer([]string{address}),
		producer.WithSendMsgTimeout(20*time.Second),
		producer.WithRetry(2),
	)
	if err != nil {
		return err
	}
	if err := made.Start(); err != nil {
		return err
	}
	plain := message(topic, "plain")
	plain.WithTag("red").WithKeys([]string{"order-1", "order-2"}).WithProperty("size", "9")
	for _, name := range []string{"plain", "again"} { // the same object, and so the same id
		result, err := made.SendSync(context.Background(), plain)
		if err != nil {
			return err
		}
		sent(name, result)
	}

	answered := make(chan error, 1)
	err = made.SendAsync(context.Background(),
		func(_ context.Context, result *primitive.SendResult, err error) {
			if err == nil {
				sent("async", result)
			}
			answered <- err
		}, message(topic, "async"))
	if err != nil {
		return err
	}
	if err := <-answered; err != nil {
		return err
	}
	if err := made.SendOneWay(context.Background(), message(topic, "one-way")); err != nil {
		return err
	}

	batch := make([]*primitive.Message, 3)
	for number := range batch {
		batch[number] = message(topic, "batch-"+strconv.Itoa(number))
	}
	result, err := made.SendSync(context.Background(), batch...)
	if err != nil {
		return err
	}
	sent("batch", result)
	large := message(topic, strings.Repeat("large ", 20_000)) // compressed
	if result, err = made.SendSync(context.Background(), large); err != nil {
		return err
	}
	sent("large", result)
	return made.Shutdown()
}

type listener struct{}

func (listener) ExecuteLocalTransaction(message *primitive.Message) primitive.LocalTransactionState {
	switch string(message.Body) {
	case "commit":
		return primitive.CommitMessageState
	case "rollback":
		return primitive.RollbackMessageState
	}
	return primitive.UnknowState
}

func (listener) CheckLocalTransaction(message *primitive.MessageExt) primitive.LocalTransactionState {
	emit(map[string]string{"event": "check", "body": string(message.Body)})
	if string(message.Body) == "later" {
		return primitive.CommitMessageState
	}
	return primitive.RollbackMessageState
}

// GROUP TOPIC NAME...: a half message for each name, which says how it ends; at its first check
// "later" is committed and "never" rolled back. Runs until stdin ends.
func transaction(arguments []string) error {
	made, err := rocketmq.NewTransactionProducer(listener{},
		producer.WithGroupName(arguments[1]),
		producer.WithNameServer([]string{address}),
		producer.WithSendMsgTimeout(20*time.Second),
	)
	if err != nil {
		return err
	}
	if err := made.Start(); err != nil {
		return err
	}
	for _, name := range arguments[3:] {
		half := message(arguments[2], name)
		half.WithProperty("CHECK_IMMUNITY_TIME_IN_SECONDS", "1")
		result, err := made.SendMessageInTransaction(context.Background(), half)
		if err != nil {
			return err
		}
		sent(name, result.SendResult)
	}
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil { // until the test closes it
		return err
	}
	return made.Shutdown()
}

// -- consumers

// GROUP TOPIC EXPRESSION: consumes until stdin ends; a body that starts with "bad" fails.
func push(arguments []string) error {
	orderly := arguments[0] == "orderly"
	options := []consumer.Option{
		consumer.WithGroupName(arguments[1]),
		consumer.WithInstance(strconv.Itoa(os.Getpid())),
		consumer.WithNameServer([]string{address}),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset),
		consumer.WithConsumerOrder(orderly),
	}
	if len(arguments) > 4 {
		times, err := strconv.Atoi(arguments[4])
		if err != nil {
			return err
		}
		options = append(options, consumer.WithMaxReconsumeTimes(int32(times)))
	}
	made, err := rocketmq.NewPushConsumer(options...)
	if err != nil {
		return err
	}
	selector := consumer.MessageSelector{Type: consumer.TAG, Expression: arguments[3]}
	if sql, ok := strings.CutPrefix(arguments[3], "sql:"); ok {
		selector = consumer.MessageSelector{Type: consumer.SQL92, Expression: sql}
	}
	err = made.Subscribe(arguments[2], selector,
		func(on context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
			bad := false
			for _, message := range messages {
				got(message)
				bad = bad || bytes.HasPrefix(message.Body, []byte("bad"))
			}
			if !bad {
				return consumer.ConsumeSuccess, nil
			}
			if concurrently, ok := primitive.GetConcurrentlyCtx(on); ok {
				concurrently.DelayLevelWhenNextConsume = 1 // 1 s
			}
			return consumer.ConsumeRetryLater, nil
		})
	if err != nil {
		return err
	}
	if err := made.Start(); err != nil {
		return err
	}
	emit(map[string]string{"event": "started"})
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil { // until the test closes it
		return err
	}
	if err := made.Shutdown(); err != nil {
		return err
	}
	emit(map[string]string{"event": "stopped"})
	return nil
}

func message(topic, body string) *primitive.Message {
	return primitive.NewMessage(topic, []byte(body))
}

// -- lines of JSON

func sent(name string, result *primitive.SendResult) {
	status := "SEND_OK"
	if result.Status != primitive.SendOK {
		status = strconv.Itoa(int(result.Status))
	}
	emit(map[string]string{
		"event":     "sent",
		"name":      name,
		"status":    status,
		"id":        result.MsgID,
		"offset_id": result.OffsetMsgID,
		"broker":    result.MessageQueue.BrokerName,
		"queue":     strconv.Itoa(result.MessageQueue.QueueId),
		"offset":    strconv.FormatInt(result.QueueOffset, 10),
	})
}

func got(message *primitive.MessageExt) {
	emit(map[string]string{
		"event":  "got",
		"topic":  message.Topic,
		"id":     message.MsgId,
		"body":   string(message.Body),
		"tag":    message.GetTags(),
		"keys":   message.GetKeys(),
		"size":   message.GetProperty("size"),
		"times":  strconv.Itoa(int(message.ReconsumeTimes)),
		"queue":  strconv.Itoa(message.Queue.QueueId),
		"broker": message.Queue.BrokerName,
		"offset": strconv.FormatInt(message.QueueOffset, 10),
	})
}

func emit(fields map[string]string) {
	line, err := json.Marshal(fields)
	if err != nil {
		panic(err)
	}
	output.Lock()
	defer output.Unlock()
	fmt.Println(string(line))
}
