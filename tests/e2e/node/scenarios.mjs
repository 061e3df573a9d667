// Scenarios of the official Node client: the twin of ../scenario_client.py, with the same question
// on stdin and the same answers on stdout. They run beside each other.

import { createHash, randomBytes } from 'node:crypto';
import { createInterface } from 'node:readline';
import {
  ConsumeResult,
  FilterExpression,
  Producer,
  PushConsumer,
  SimpleConsumer,
} from 'rocketmq-client-nodejs';

const INVISIBLE_MS = 30000;
// Of enums that the package does not export.
const SQL = 2;
const COMMIT = 1;

const scenarios = {
  awaits,
  large,
  gzip,
  many_topics: manyTopics,
  filters,
  transactions,
  ranks,
  expiring,
  ordered,
  letters,
  everyone,
};

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const start = JSON.parse((await lines.next()).value);
await Promise.all(start.run.map(async (name) => {
  let seen;
  try {
    seen = await scenarios[name]();
  } catch (error) {
    seen = { error: error.stack };
  }
  process.stdout.write(`${JSON.stringify({ scenario: name, ...seen })}\n`);
}));
// Timers of the client's logger would keep the process alive.
process.exit(0);

// How long waits of every length took with nothing there, in seconds.
async function awaits() {
  const consumers = await Promise.all(
    start.awaits.map((awaitS) => consumerOf(`waits-${awaitS}`, 'quiet', awaitS)),
  );
  const tookS = {};
  await Promise.all(consumers.map(async (consumer, i) => {
    const begunMs = performance.now();
    const found = await consumer.receive(1, INVISIBLE_MS);
    if (found.length > 0) throw new Error('something came');
    tookS[start.awaits[i]] = (performance.now() - begunMs) / 1000;
  }));
  return { took_s: tookS };
}

async function large() {
  const body = randomBytes(start.large_bytes);
  const consumer = await consumerOf('large', 'large', 10);
  const producer = await producerOf('large');
  await producer.send({ topic: 'large', body });
  const found = await received(consumer);
  return { sent: sha256(body), received: found.map((one) => sha256(one.body)) };
}

// What the test sent compressed.
async function gzip() {
  const found = await received(await consumerOf('gzip', 'gzip', 10));
  return { received: found.map(text) };
}

async function manyTopics() {
  const topics = Array.from({ length: 200 }, (_, number) => `many-${number}`);
  const begunMs = performance.now();
  const producer = await producerOf(...topics);
  const readyS = (performance.now() - begunMs) / 1000;
  const ids = new Set();
  for (const topic of topics) {
    const receipt = await producer.send({ topic, body: Buffer.from('x') });
    ids.add(receipt.messageId);
  }
  return { ready_s: readyS, sent: ids.size };
}

async function filters() {
  const producer = await producerOf('filtered');
  for (let number = 0; number < 20; number++) {
    await producer.send({
      topic: 'filtered',
      body: Buffer.from(String(number)),
      tag: number % 2 === 0 ? 'even' : 'odd',
      properties: new Map([['number', String(number)]]),
    });
  }
  const sql = new FilterExpression("number BETWEEN 5 AND 8 AND TAGS = 'even'", SQL);
  const consumers = {
    tags: await consumerOf('tags', 'filtered', 5, 'odd || none'),
    sql: await consumerOf('sql', 'filtered', 5, sql),
  };
  const seen = {};
  await Promise.all(Object.entries(consumers).map(async ([name, consumer]) => {
    seen[name] = numbers(await received(consumer, 2));
  }));
  return seen;
}

async function transactions() {
  const checked = [];
  const producer = await producerOf('halves', {
    checker: {
      async check(message) {
        checked.push(text(message));
        return COMMIT;
      },
    },
  });
  for (const [body, end] of [['kept', 'commit'], ['dropped', 'rollback']]) {
    const transaction = producer.beginTransaction();
    await producer.send({ topic: 'halves', body: Buffer.from(body) }, transaction);
    await transaction[end]();
  }
  const forgotten = producer.beginTransaction();
  await producer.send({ topic: 'halves', body: Buffer.from('orphan') }, forgotten);
  const consumer = await consumerOf('ends', 'halves', 5);
  const found = [];
  const untilMs = Date.now() + start.check_s * 1000;
  while (found.length < 2 && Date.now() < untilMs) found.push(...await received(consumer));
  found.push(...await received(consumer));
  return { received: found.map(text).sort(), checked };
}

async function ranks() {
  const producer = await producerOf('ranked');
  for (const priority of [1, 3, 2]) {
    await producer.send({ topic: 'ranked', body: Buffer.from(String(priority)), priority });
  }
  const consumer = await consumerOf('ranks', 'ranked', 5);
  const found = [];
  for (let i = 0; i < 3; i++) found.push(...await received(consumer, 1, 1));
  return { received: found.map((one) => Number(text(one))) };
}

async function expiring() {
  const producer = await producerOf('expiring');
  for (const [body, ttlMs] of [['old', '1000'], ['stays', '600000']]) {
    const properties = new Map([['TTL_MS', ttlMs]]);
    await producer.send({ topic: 'expiring', body: Buffer.from(body), properties });
  }
  // Real time, which the broker measures: the first message's is over then.
  await new Promise((resolve) => setTimeout(resolve, 1200));
  const consumer = await consumerOf('late', 'expiring', 3);
  return { received: (await received(consumer, 2)).map(text).sort() };
}

// Messages of 20 groups. Every seventh group fails each third of its messages at first: it and what
// the same reply has of the group behind it are to come again in a second.
async function ordered() {
  const producer = await producerOf('ordered');
  const keys = Array.from({ length: 20 }, (_, key) => `key-${key}`);
  for (let number = 0; number < 6; number++) {
    for (const messageGroup of keys) {
      await producer.send({ topic: 'ordered', body: Buffer.from(String(number)), messageGroup });
    }
  }
  const consumer = await consumerOf('in-order', 'ordered', 5);
  const acked = Object.fromEntries(keys.map((key) => [key, []]));
  let failed = 0;
  const untilMs = Date.now() + start.check_s * 1000;
  while (Object.values(acked).flat().length < 120 && Date.now() < untilMs) {
    const stuck = new Set();
    for (const one of await consumer.receive(32, INVISIBLE_MS)) {
      const { messageGroup: key, deliveryAttempt } = one;
      const number = Number(text(one));
      const fails = deliveryAttempt === 1 && Number(key.slice(4)) % 7 === 0 && number % 3 === 0;
      if (fails || stuck.has(key)) {
        stuck.add(key);
        failed++;
        await consumer.changeInvisibleDuration(one, 1000);
      } else {
        await consumer.ack(one);
        acked[key].push(number);
      }
    }
  }
  return { acked, failed };
}

// One message that a push consumer never manages: when it came, and as which attempt.
async function letters() {
  const producer = await producerOf('letters');
  const { messageId } = await producer.send({ topic: 'letters', body: Buffer.from('poison') });
  const deliveries = [];
  await new Promise((resolve, reject) => {
    new PushConsumer({
      ...base(),
      consumerGroup: 'letters',
      subscriptions: new Map([['letters', '*']]),
      messageListener: {
        async consume(message) {
          deliveries.push([message.deliveryAttempt, Date.now()]);
          if (deliveries.length === start.attempts) resolve();
          return ConsumeResult.FAILURE;
        },
      },
    }).startup().catch(reject);
    setTimeout(resolve, start.check_s * 1000);
  });
  return { sent: messageId, deliveries };
}

// Three instances, each with a group of its own; and one group that two more of them share.
async function everyone() {
  const groups = ['each-1', 'each-2', 'each-3', 'shared', 'shared'];
  const consumers = await Promise.all(groups.map((group) => consumerOf(group, 'everyone', 2)));
  const producer = await producerOf('everyone');
  for (let number = 0; number < 20; number++) {
    await producer.send({ topic: 'everyone', body: Buffer.from(String(number)) });
  }
  const found = await Promise.all(consumers.map((consumer) => received(consumer, 4)));
  const seen = {};
  groups.forEach((group, i) => {
    seen[group] = [...(seen[group] ?? []), ...numbers(found[i])].sort((a, b) => a - b);
  });
  return seen;
}

async function producerOf(...topics) {
  const more = typeof topics.at(-1) === 'object' ? topics.pop() : {};
  const producer = new Producer({ ...base(), topics, ...more });
  await producer.startup();
  return producer;
}

async function consumerOf(group, topic, awaitS, filter = '*') {
  const consumer = new SimpleConsumer({
    ...base(),
    consumerGroup: group,
    awaitDuration: awaitS * 1000,
    subscriptions: new Map([[topic, filter]]),
  });
  await consumer.startup();
  return consumer;
}

// What so many receives brought, acknowledged.
async function received(consumer, rounds = 1, limit = 32) {
  const found = [];
  for (let round = 0; round < rounds; round++) {
    const got = await consumer.receive(limit, INVISIBLE_MS);
    for (const one of got) await consumer.ack(one);
    found.push(...got);
  }
  return found;
}

function base() {
  const logger = { debug() {}, info() {}, warn: console.error, error: console.error };
  return { endpoints: start.endpoint, namespace: '', logger };
}

function text(message) {
  return message.body.toString();
}

function numbers(messages) {
  return messages.map((one) => Number(text(one))).sort((a, b) => a - b);
}

function sha256(data) {
  return createHash('sha256').update(data).digest('hex');
}
