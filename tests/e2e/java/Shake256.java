import java.nio.ByteBuffer;
import java.nio.ByteOrder;

/** SHAKE-256 (FIPS 202) of a short input, which the JDK does not have. */
final class Shake256 {
    private static final int RATE = 136;
    private static final long[] CONSTANTS = constants();

    private Shake256() {}

    static byte[] of(byte[] input, int length) {
        byte[] padded = new byte[(input.length / RATE + 1) * RATE];
        System.arraycopy(input, 0, padded, 0, input.length);
        padded[input.length] ^= 0x1f;
        padded[padded.length - 1] ^= (byte) 0x80;
        long[] state = new long[25];
        ByteBuffer words = ByteBuffer.wrap(padded).order(ByteOrder.LITTLE_ENDIAN);
        while (words.hasRemaining()) {
            for (int i = 0; i < RATE / 8; i++) state[i] ^= words.getLong();
            permute(state);
        }
        ByteBuffer out = ByteBuffer.allocate((length + RATE - 1) / RATE * RATE);
        out.order(ByteOrder.LITTLE_ENDIAN);
        while (out.hasRemaining()) {
            for (int i = 0; i < RATE / 8; i++) out.putLong(state[i]);
            if (out.hasRemaining()) permute(state);
        }
        return java.util.Arrays.copyOf(out.array(), length);
    }

    private static void permute(long[] a) {
        long[] c = new long[5];
        long[] b = new long[25];
        for (long constant : CONSTANTS) {
            for (int x = 0; x < 5; x++) c[x] = a[x] ^ a[x + 5] ^ a[x + 10] ^ a[x + 15] ^ a[x + 20];
            for (int x = 0; x < 5; x++) {
                long d = c[(x + 4) % 5] ^ Long.rotateLeft(c[(x + 1) % 5], 1);
                for (int y = 0; y < 25; y += 5) a[x + y] ^= d;
            }
            int x = 1;
            int y = 0;
            b[0] = a[0];
            for (int t = 0; t < 24; t++) {
                int nextX = y;
                int nextY = (2 * x + 3 * y) % 5;
                b[nextX + 5 * nextY] = Long.rotateLeft(a[x + 5 * y], (t + 1) * (t + 2) / 2 % 64);
                x = nextX;
                y = nextY;
            }
            for (int row = 0; row < 25; row += 5) {
                for (int i = 0; i < 5; i++) {
                    a[row + i] = b[row + i] ^ (~b[row + (i + 1) % 5] & b[row + (i + 2) % 5]);
                }
            }
            a[0] ^= constant;
        }
    }

    /** The round constants, from the linear feedback shift register that defines them. */
    private static long[] constants() {
        long[] found = new long[24];
        int register = 1;
        for (int round = 0; round < 24; round++) {
            for (int j = 0; j <= 6; j++) {
                if ((register & 1) != 0) found[round] |= 1L << ((1 << j) - 1);
                register = register << 1 ^ ((register >> 7) * 0x171);
            }
        }
        return found;
    }
}
