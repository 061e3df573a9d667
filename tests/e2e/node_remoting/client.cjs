// Scenarios of ali-ons over Remoting: ADDRESS SCENARIO ARGUMENT...
//
// What a scenario saw leaves as JSON lines on stdout, with the names that
// java_remoting/Remoting.java uses; test_remoting_go.py judges it.
'use strict';

const httpclient = require('urllib');
const { Consumer, Message, Producer } = require('ali-ons');

const [address, scenario, ...rest] = process.argv.slice(2);
const logger = { info() {}, warn() {}, debug() {}, error: error => console.error(error) };
const common = {
  httpclient,
  logger,
  nameSrv: address,
  accessKeyId: 'key', // the client signs every request; popmq ignores that
  accessKeySecret: 'secret',
  instanceName: String(process.pid),
};

function emit(event) {
  process.stdout.write(`${JSON.stringify(event)}\n`);
}

async function send(topic, count) {
  const producer = new Producer({ ...common, producerGroup: 'node-makers' });
  await producer.ready();
  for (let number = 0; number < Number(count); number++) {
    const message = new Message(topic, 'red', `text ${number}`);
    message.keys = ['order-1'];
    const result = await producer.send(message);
    const { brokerName, queueId } = result.messageQueue;
    emit({ event: 'sent', status: result.sendStatus, broker: brokerName, queue: String(queueId) });
  }
  await producer.close();
}

// GROUP TOPIC EXPRESSION: consumes until stdin ends.
async function push(consumerGroup, topic, expression) {
  const consumer = new Consumer({
    ...common,
    consumerGroup,
    consumeFromWhere: 'CONSUME_FROM_FIRST_OFFSET',
  });
  consumer.on('error', error => emit({ event: 'error', error: String(error) }));
  consumer.subscribe(topic, expression, async message => {
    emit({
      event: 'got',
      id: message.msgId,
      body: message.body.toString(),
      tag: message.tags,
      queue: String(message.queueId),
    });
  });
  await consumer.ready();
  emit({ event: 'started' });
  process.stdin.resume();
  await new Promise(resolve => process.stdin.on('end', resolve));
  await consumer.close();
}

({ send, push })[scenario](...rest).then(
  () => process.exit(0),
  error => {
    emit({ event: 'error', error: String(error) });
    process.exit(1);
  },
);
