// A producer of transactions with the official Node client: the twin of ../transaction_client.py, with
// the same arguments and journal. What becomes of a number is in a file, its "database".

import { openSync, readFileSync, writeSync } from 'node:fs';
import { Producer } from 'rocketmq-client-nodejs';

const WORKERS = 4;
const PAUSE_MS = 300; // after a failure: something is away
// Of an enum that the package does not export.
const COMMIT = 1;
const ROLLBACK = 2;

const [endpoints, topic, path, first, end, database] = process.argv.slice(2);
const journal = openSync(path, 'a');
const decided = JSON.parse(readFileSync(database, 'utf8'));
const committed = new Set(decided.committed);
const forgotten = new Set(decided.forgotten);

const producer = await started();
console.log('ready');
let next = Number(first);
await Promise.all(Array.from({ length: WORKERS }, work));
console.log('done');
// To be asked about orphans until it is killed, or its stdin ends.
process.stdin.resume().on('end', () => process.exit(0));

async function started() {
  const checker = {
    async check(message) {
      return committed.has(Number(message.body.toString())) ? COMMIT : ROLLBACK;
    },
  };
  const logger = { debug() {}, info() {}, warn: console.error, error: console.error };
  for (;;) {
    const made = new Producer({ endpoints, namespace: '', logger, topics: [topic], checker });
    try {
      await made.startup();
      return made;
    } catch {
      await pause();
    }
  }
}

async function work() {
  while (next < Number(end)) await one(next++);
}

async function one(number) {
  say('tried', number);
  try {
    const transaction = producer.beginTransaction();
    await producer.send({ topic, body: Buffer.from(String(number)) }, transaction);
    say('sent', number);
    if (forgotten.has(number)) return;
    await (committed.has(number) ? transaction.commit() : transaction.rollback());
    say('ended', number);
  } catch {
    say('failed', number);
    await pause();
  }
}

function say(what, number) {
  writeSync(journal, `${what} ${number}\n`);
}

function pause() {
  return new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
}
