// One role of the official Node client, in a process of its own: the twin of
// ../python_client.py, with the same commands on stdin and the same events on stdout.
// The role `payloads` needs no client: it prints what the messages are made of.

import { createInterface } from 'node:readline';
import { comesBack, payload, sha256 } from './payloads.mjs';

const SENDERS = 8;
const RECEIVERS = 2;
const BATCH = 16;
const LONG_POLL_MS = 10000;
// Of an enum that the package does not export.
const COMMIT = 1;
const ROLLBACK = 2;

const roles = { producer, simple, push, lite, payloads, orphans };

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const start = JSON.parse((await lines.next()).value);
const perform = await roles[process.argv[2]](start);
emit('ready');
for await (const line of lines) {
  const command = JSON.parse(line);
  if (command.op === 'stop') break;
  await perform(command);
}
emit('stopped');
// Timers of the client's logger would keep the process alive.
process.exit(0);

async function producer({ endpoint, topic }) {
  const { Producer } = await import('rocketmq-client-nodejs');
  const client = new Producer({ ...base(endpoint), topics: [topic] });
  await client.startup();
  const bornMs = watchBornTimes(client);

  async function send(k, { seed, max_body: maxBody }) {
    const { body, keys, tag, properties } = payload({ seed, k, maxBody });
    try {
      const receipt = await client.send({ topic, body, keys, tag, properties });
      const messageId = receipt.messageId;
      emit('sent', {
        k,
        message_id: messageId,
        receipt_id: messageId,
        offset: receipt.offset,
        born_ms: bornMs.get(messageId) ?? [],
      });
    } catch (error) {
      emit('send_failed', { k, error: String(error) });
    }
  }

  async function delay({ name, deliver_at_s: deliverAtS }) {
    const deliveryTimestamp = new Date(deliverAtS * 1000);
    try {
      const receipt = await client.send({ topic, body: Buffer.from(name), deliveryTimestamp });
      emit('sent', { name, message_id: receipt.messageId, handle: receipt.recallHandle ?? '' });
    } catch (error) {
      emit('send_failed', { name, error: String(error) });
    }
  }

  async function recall({ name, handle }) {
    try {
      const receipt = await client.recallMessage(topic, handle);
      emit('recalled', { name, message_id: receipt.messageId });
    } catch (error) {
      emit('recall_failed', { name, error: String(error) });
    }
  }

  return async (command) => {
    if (command.op === 'delay') return delay(command);
    if (command.op === 'recall') return recall(command);
    const left = command.numbers.values();
    const sender = async () => {
      for (const k of left) await send(k, command);
    };
    await Promise.all(Array.from({ length: SENDERS }, sender));
    emit('done');
  };
}

// Sends half messages and forgets them; asked, it commits those whose name begins so.
async function orphans({ endpoint, topic }) {
  const { Producer } = await import('rocketmq-client-nodejs');
  const checker = {
    async check(message) {
      const name = message.body.toString();
      emit('checked', { name });
      return name.startsWith('commit') ? COMMIT : ROLLBACK;
    },
  };
  const client = new Producer({ ...base(endpoint), topics: [topic], checker });
  await client.startup();
  return async ({ name }) => {
    const message = { topic, body: Buffer.from(name) };
    const { messageId } = await client.send(message, client.beginTransaction());
    emit('sent', { name, message_id: messageId });
  };
}

async function simple({ endpoint, topic, group, invisible_s: invisibleS }) {
  const { SimpleConsumer } = await import('rocketmq-client-nodejs');
  const client = new SimpleConsumer({
    ...base(endpoint),
    consumerGroup: group,
    awaitDuration: LONG_POLL_MS,
    subscriptions: new Map([[topic, '*']]),
  });
  await client.startup();

  async function receiveForEver() {
    for (;;) {
      let messages;
      try {
        messages = await client.receive(BATCH, invisibleS * 1000);
      } catch (error) {
        emit('error', { error: `receive: ${error}` });
        await new Promise((resolve) => setTimeout(resolve, 200));
        continue;
      }
      const receivedMs = Date.now();
      for (const message of messages) {
        const acked = !refused(message);
        emitDelivery(message, receivedMs, acked);
        // Not waited for, so that the receiver is back in its long poll at once.
        if (acked) ack(message);
      }
    }
  }

  function ack(message) {
    client.ack(message).catch((error) => {
      emit('ack_failed', {
        message_id: message.messageId,
        attempt: message.deliveryAttempt,
        error: String(error),
      });
    });
  }

  for (let i = 0; i < RECEIVERS; i++) receiveForEver();
  return refuseCommand;
}

async function push({ endpoint, topic, group }) {
  const { PushConsumer, ConsumeResult } = await import('rocketmq-client-nodejs');
  const client = new PushConsumer({
    ...base(endpoint),
    consumerGroup: group,
    subscriptions: new Map([[topic, '*']]),
    messageListener: {
      async consume(message) {
        const receivedMs = Date.now();
        const acked = !refused(message);
        emitDelivery(message, receivedMs, acked);
        return acked ? ConsumeResult.SUCCESS : ConsumeResult.FAILURE;
      },
    },
  });
  await client.startup();
  return refuseCommand;
}

// Produces for lite topics, and consumes those that it is told to subscribe to.
async function lite({ endpoint, topic, group }) {
  const { Producer, LitePushConsumerImpl, ConsumeResult, OffsetOption } = await import(
    'rocketmq-client-nodejs'
  );
  const producer = new Producer({ ...base(endpoint), topics: [topic] });
  await producer.startup();
  const client = new LitePushConsumerImpl({
    ...base(endpoint),
    consumerGroup: group,
    bindTopic: topic,
    messageListener: {
      async consume(message) {
        emit('got', { lite_topic: message.liteTopic, body: message.body.toString() });
        return ConsumeResult.SUCCESS;
      },
    },
  });
  await client.startup();
  const does = {
    send: ({ lite_topic: liteTopic, body }) =>
      producer.send({ topic, liteTopic, body: Buffer.from(body) }),
    subscribe: ({ lite_topic: liteTopic, at_ms: atMs }) =>
      client.subscribeLite(liteTopic, atMs ? OffsetOption.ofTimestamp(atMs) : undefined),
    unsubscribe: ({ lite_topic: liteTopic }) => client.unsubscribeLite(liteTopic),
  };
  return async (command) => {
    try {
      await does[command.op](command);
      emit('done', { op: command.op });
    } catch (error) {
      emit('refused', { op: command.op, error: String(error) });
    }
  };
}

async function payloads({ seed, count, max_body: maxBody }) {
  for (let k = 0; k < count; k++) {
    const { body, keys, tag, properties } = payload({ seed, k, maxBody });
    emit('payload', {
      k,
      sha256: sha256(body),
      size: body.length,
      keys: [...keys].sort(),
      tag,
      properties: Object.fromEntries(properties),
    });
  }
  return refuseCommand;
}

function refuseCommand(command) {
  throw new Error(`no such command: ${JSON.stringify(command)}`);
}

function base(endpoints) {
  const logger = { debug() {}, info() {}, warn: console.error, error: console.error };
  return { endpoints, namespace: start.namespace ?? '', logger, sslEnabled: process.argv[3] === 'tls' };
}

// Born times by message id, one for each request that left: the client tells nobody, and the
// requests are only looked at.
function watchBornTimes(client) {
  const bornMs = new Map();
  const rpc = client.rpcClientManager;
  const send = rpc.sendMessage.bind(rpc);
  rpc.sendMessage = (endpoints, request, ...rest) => {
    for (const message of request.getMessagesList()) {
      const system = message.getSystemProperties();
      const id = system.getMessageId();
      if (!bornMs.has(id)) bornMs.set(id, []);
      bornMs.get(id).push(system.getBornTimestamp().toDate().getTime());
    }
    return send(endpoints, request, ...rest);
  };
  return bornMs;
}

function refused(message) {
  return message.deliveryAttempt === 1 && comesBack(Number(message.properties.get('k') ?? 0));
}

function emitDelivery(message, receivedMs, acked) {
  emit('delivered', {
    message_id: message.messageId,
    attempt: message.deliveryAttempt,
    sha256: sha256(message.body),
    size: message.body.length,
    keys: [...message.keys].sort(),
    tag: message.tag,
    properties: Object.fromEntries(message.properties),
    born_ms: message.bornTimestamp?.getTime() ?? null,
    corrupted: message.corrupted === true,
    delivered_ms: message.transportDeliveryTimestamp?.getTime() ?? null,
    received_ms: receivedMs,
    acked,
    settled_ms: Date.now(),
  });
}

function emit(event, fields = {}) {
  process.stdout.write(`${JSON.stringify({ event, ...fields })}\n`);
}
