// An official Node consumer that shares a group and may be killed: the twin of
// ../shared_client.py, with the same journal and the same dice.

import { createHash } from 'node:crypto';
import { openSync, writeSync } from 'node:fs';
import { createInterface } from 'node:readline';
import { PushConsumer, SimpleConsumer, ConsumeResult } from 'rocketmq-client-nodejs';

const RECEIVERS = 2;
const BATCH = 16;
const LONG_POLL_MS = 5000;
const OPS = {
  ackMessage: 'ack',
  changeInvisibleDuration: 'nack',
  forwardMessageToDeadLetterQueue: 'reject',
};

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const start = JSON.parse((await lines.next()).value);
const journal = openSync(start.journal, 'a');
let calls = 0;

await { simple, push }[process.argv[2]]();
emit('ready');
for await (const line of lines) {
  const command = JSON.parse(line);
  if (command.op === 'stop') break;
  throw new Error(`no such command: ${line}`);
}
process.exit(0);

async function simple() {
  const client = new SimpleConsumer({
    ...base(),
    awaitDuration: LONG_POLL_MS,
    subscriptions: new Map([[start.topic, '*']]),
  });
  watch(client);
  await client.startup();

  async function receiveForEver(receiver) {
    for (let receive = receiver; ; receive += RECEIVERS) {
      const askedMs = Date.now();
      let messages;
      try {
        messages = await client.receive(BATCH, start.invisible_s * 1000);
      } catch (error) {
        emit('error', { error: `receive: ${error}` });
        await new Promise((resolve) => setTimeout(resolve, 200));
        continue;
      }
      messages.forEach((message, place) => seen(message, { receive, place, asked_ms: askedMs }));
      await Promise.all(byKey(messages).map((list) => settle(client, list)));
    }
  }

  for (let receiver = 0; receiver < RECEIVERS; receiver++) receiveForEver(receiver);
}

// Messages of one key, in order: behind one that fails, none may be acknowledged.
async function settle(client, messages) {
  let action = 'ack';
  for (const message of messages) {
    if (action === 'ack') action = actionFor(message, message.deliveryAttempt);
    try {
      if (action === 'ack') await client.ack(message);
      if (action === 'nack') await client.changeInvisibleDuration(message, waitMs(message));
    } catch {
      action = 'leave'; // the journal has the outcome
    }
  }
}

function byKey(messages) {
  const lists = new Map();
  for (const message of messages) {
    const key = message.messageGroup || message.messageId;
    if (!lists.has(key)) lists.set(key, []);
    lists.get(key).push(message);
  }
  return [...lists.values()];
}

async function push() {
  // An ordered push consumer tries again by itself, with the same handle.
  const first = new Map();
  const client = new PushConsumer({
    ...base(),
    subscriptions: new Map([[start.topic, '*']]),
    messageListener: {
      async consume(message) {
        const handle = message.receiptHandle;
        const before = first.get(handle) ?? { attempt: message.deliveryAttempt, tries: 0 };
        first.set(handle, { attempt: before.attempt, tries: before.tries + 1 });
        if (before.tries === 0) seen(message, { receive: null, place: 0, asked_ms: Date.now() });
        const nack = actionFor(message, before.attempt + before.tries) === 'nack';
        return nack ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
      },
    },
  });
  watch(client);
  await client.startup();
}

function base() {
  const logger = { debug() {}, info() {}, warn: console.error, error: console.error };
  return { endpoints: start.endpoint, namespace: '', consumerGroup: start.group, logger };
}

function watch(client) {
  const rpc = client.rpcClientManager;
  for (const [name, op] of Object.entries(OPS)) {
    const send = rpc[name].bind(rpc);
    rpc[name] = async (endpoints, request, ...rest) => {
      const call = ++calls;
      const one = op === 'ack' ? request.getEntriesList()[0] : request;
      const duration = op === 'nack' ? request.getInvisibleDuration() : undefined;
      const ms = duration ? duration.getSeconds() * 1000 + duration.getNanos() / 1e6 : 0;
      write('begin', { call, op, handle: one.getReceiptHandle(), wait_ms: Math.floor(ms) });
      try {
        const reply = await send(endpoints, request, ...rest);
        write('end', { call, code: reply.getStatus().getCode() });
        return reply;
      } catch (error) {
        write('end', { call, code: 0, error: String(error) });
        throw error;
      }
    };
  }
}

function seen(message, fields) {
  const { messageId: id, deliveryAttempt: attempt, receiptHandle: handle } = message;
  write('seen', { id, attempt, handle, ...fields });
}

function write(kind, fields) {
  writeSync(journal, `${JSON.stringify({ at: Date.now(), kind, ...fields })}\n`);
}

function actionFor(message, attempt) {
  const k = number(message);
  if (draw(k, 0) < start.odds.poison) return 'nack';
  let drawn = draw(k, attempt);
  for (const action of ['nack', 'leave']) {
    if (drawn < start.odds[action]) return action;
    drawn -= start.odds[action];
  }
  return 'ack';
}

function waitMs(message) {
  return Math.floor(draw(number(message), -1) * 2) * 1000;
}

function number(message) {
  return Number(message.body.toString());
}

function draw(k, attempt) {
  const digest = createHash('sha256').update(`${start.seed}/${k}/${attempt}`).digest();
  return digest.readUInt32BE(0) / 2 ** 32;
}

function emit(event, fields = {}) {
  process.stdout.write(`${JSON.stringify({ event, ...fields })}\n`);
}
