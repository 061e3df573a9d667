// The messages that the official clients send; the port of ../payloads.py, to the letter.

import { createHash } from 'node:crypto';

const LETTERS = Array.from(
  'abcdefghijklmnopqrstuvwxyz0123456789äöüßéèñøåçşžłβδλџджшщ漢字水火山中文日本🙂🚀',
);
const TAGS = ['plain', 'grün', '付款', 'new_user'];
const TEXT_LIMIT = 2048;

export function comesBack(k) {
  return k % 10 === 3;
}

export function payload({ seed, k, maxBody }) {
  const draw = bytes(seed, k, 'fields', 64);
  const size = bodySize(k, draw.readUInt32BE(0), maxBody);
  const properties = new Map([['k', String(k)], ['size', String(size)]]);
  for (let i = 0; i < 18; i++) {
    const word = text(bytes(seed, k, `property-${i}`, 4 * (1 + (draw[16 + i] % 12)))).join('');
    properties.set(propertyName(i), word);
  }
  return {
    k,
    body: makeBody(seed, k, size),
    keys: [`order-${seed}-${k}`, `client-é${draw.readUInt32BE(4) % 100}`],
    tag: TAGS[draw[8] % TAGS.length],
    properties,
  };
}

export function sha256(data) {
  return createHash('sha256').update(data).digest('hex');
}

function bodySize(k, draw, maxBody) {
  if (k % 167 === 83) return maxBody;
  if (k % 50 === 7) return 65536 + (draw % 196608);
  if (k % 10 === 5) return 1024 + (draw % 64512);
  if (k % 20 === 1) return 1;
  return 1 + (draw % 1024);
}

function makeBody(seed, k, size) {
  const raw = bytes(seed, k, 'body', size);
  if (k % 3 !== 0 || size > TEXT_LIMIT) return raw;
  const body = Buffer.alloc(size, 'x');
  let used = 0;
  for (const letter of text(raw)) {
    const encoded = Buffer.from(letter, 'utf8');
    if (used + encoded.length > size) break;
    used += encoded.copy(body, used);
  }
  return body;
}

function text(raw) {
  return Array.from(raw, (byte) => LETTERS[byte % LETTERS.length]);
}

function propertyName(i) {
  const special = { 3: 'größe', 7: '数量' };
  return special[i] ?? `property-${String(i).padStart(2, '0')}`;
}

function bytes(seed, k, purpose, length) {
  return createHash('shake256', { outputLength: length }).update(`${seed}/${k}/${purpose}`).digest();
}
