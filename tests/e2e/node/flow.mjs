// An official Node client that sends, delays, and consumes without a pause, as a push consumer
// unless its start says `simple`: the twin of ../flow_client.py, with the same commands and events.

import { createInterface } from 'node:readline';
import { ConsumeResult, Producer, PushConsumer, SimpleConsumer } from 'rocketmq-client-nodejs';

const SENDERS = 4;
const PAUSE_MS = 50;
const DELAYED = 5;
const RECEIVERS = 2;
const BATCH = 16;
const LONG_POLL_MS = 2000;

let number = 0;
let sending = true;
let senders = [];

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const start = JSON.parse((await lines.next()).value);
const pauseMs = start.pause_s === undefined ? PAUSE_MS : 1000 * start.pause_s;
const consumer = start.kind === 'simple' ? await receive() : await consume();
const producer = new Producer({ ...base(), topics: [start.topic, start.later] });
await producer.startup();
emit('ready');
for await (const line of lines) {
  const { op } = JSON.parse(line);
  if (op === 'go') {
    senders = Array.from({ length: SENDERS }, (_, sender) => sendForEver(sender));
  } else if (op === 'quiet') {
    sending = false;
    await Promise.all(senders);
    emit('done');
  } else {
    break;
  }
}
// Timers of the client's logger would keep the process alive.
process.exit(0);

async function sendForEver(sender) {
  for (let k = sender; sending; k += SENDERS) {
    await send(k);
    await new Promise((resolve) => setTimeout(resolve, pauseMs));
  }
}

async function send(k) {
  const name = `${start.name ?? 'node'}-${k}`;
  const message = { topic: start.topic, body: Buffer.from(name) };
  let dueMs = 0;
  if (k % DELAYED === 0) {
    dueMs = Date.now() + 1000 + 1000 * (Math.floor(k / DELAYED) % 4);
    message.topic = start.later;
    message.deliveryTimestamp = new Date(dueMs);
  }
  const begunMs = Date.now();
  try {
    await producer.send(message);
    emit('sent', { name, begun_ms: begunMs, due_ms: dueMs });
  } catch (error) {
    emit('send_failed', { name, error: String(error) });
  }
}

async function consume() {
  const names = new Map(); // by receipt handle: whose acknowledgement it is
  const client = new PushConsumer({
    ...base(),
    consumerGroup: start.group,
    subscriptions: new Map([[start.topic, '*'], [start.later, '*']]),
    messageListener: {
      async consume(message) {
        const name = message.body.toString();
        names.set(message.receiptHandle, name);
        emit('seen', { name, attempt: message.deliveryAttempt });
        return ConsumeResult.SUCCESS;
      },
    },
  });
  const rpc = client.rpcClientManager;
  const ack = rpc.ackMessage.bind(rpc);
  // A push consumer tells nobody how its acknowledgements ended.
  rpc.ackMessage = async (endpoints, request, ...rest) => {
    const name = names.get(request.getEntriesList()[0].getReceiptHandle());
    try {
      const reply = await ack(endpoints, request, ...rest);
      const code = reply.getStatus().getCode();
      if (code === 20000) emit('acked', { name });
      else emit('ack_failed', { name, error: String(code) });
      return reply;
    } catch (error) {
      emit('ack_failed', { name, error: String(error) });
      throw error;
    }
  };
  await client.startup();
  return client;
}

async function receive() {
  const client = new SimpleConsumer({
    ...base(),
    consumerGroup: start.group,
    awaitDuration: LONG_POLL_MS,
    subscriptions: new Map([[start.topic, '*'], [start.later, '*']]),
  });
  await client.startup();
  for (let i = 0; i < RECEIVERS; i++) receiveForEver(client);
  return client;
}

async function receiveForEver(client) {
  for (;;) {
    let messages = [];
    try {
      messages = await client.receive(BATCH, start.invisible_s * 1000);
    } catch (error) {
      emit('error', { error: `receive: ${error}` });
      await new Promise((resolve) => setTimeout(resolve, 100));
    }
    for (const message of messages) {
      const name = message.body.toString();
      emit('seen', { name, attempt: message.deliveryAttempt });
      client.ack(message).then(
        () => emit('acked', { name }),
        (error) => emit('ack_failed', { name, error: String(error) }),
      );
    }
  }
}

function base() {
  const logger = { debug() {}, info() {}, warn: console.error, error: console.error };
  return { endpoints: start.endpoint, namespace: '', logger };
}

function emit(event, fields = {}) {
  const line = { event, n: number++, at_ms: Date.now(), ...fields };
  process.stdout.write(`${JSON.stringify(line)}\n`);
}
