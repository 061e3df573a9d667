import java.io.ByteArrayOutputStream;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.util.Arrays;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** The messages that the official clients send; the port of ../payloads.py, to the letter. */
final class Payloads {
    private static final String[] LETTERS =
            "abcdefghijklmnopqrstuvwxyz0123456789äöüßéèñøåçşžłβδλџджшщ漢字水火山中文日本🙂🚀"
                    .codePoints().mapToObj(Character::toString).toArray(String[]::new);
    private static final String[] TAGS = {"plain", "grün", "付款", "new_user"};
    private static final Map<Integer, String> NAMES = Map.of(3, "größe", 7, "数量");
    private static final int TEXT_LIMIT = 2048;

    record Payload(byte[] body, List<String> keys, String tag, Map<String, String> properties) {}

    private Payloads() {}

    static boolean comesBack(long k) {
        return k % 10 == 3;
    }

    static Payload payload(long seed, long k, int maxBody) {
        byte[] draw = bytes(seed, k, "fields", 64);
        int size = bodySize(k, unsigned(draw, 0), maxBody);
        Map<String, String> properties = new LinkedHashMap<>();
        properties.put("k", Long.toString(k));
        properties.put("size", Integer.toString(size));
        for (int i = 0; i < 18; i++) {
            int length = 4 * (1 + (draw[16 + i] & 0xff) % 12);
            String[] word = text(bytes(seed, k, "property-" + i, length));
            String name = NAMES.getOrDefault(i, String.format("property-%02d", i));
            properties.put(name, String.join("", word));
        }
        List<String> keys = List.of("order-" + seed + "-" + k, "client-é" + unsigned(draw, 4) % 100);
        return new Payload(body(seed, k, size), keys, TAGS[(draw[8] & 0xff) % TAGS.length], properties);
    }

    static String sha256(byte[] data) {
        try {
            return HexFormat.of().formatHex(MessageDigest.getInstance("SHA-256").digest(data));
        } catch (java.security.NoSuchAlgorithmException error) {
            throw new AssertionError(error);
        }
    }

    private static int bodySize(long k, long draw, int maxBody) {
        if (k % 167 == 83) return maxBody;
        if (k % 50 == 7) return (int) (65536 + draw % 196608);
        if (k % 10 == 5) return (int) (1024 + draw % 64512);
        if (k % 20 == 1) return 1;
        return (int) (1 + draw % 1024);
    }

    private static byte[] body(long seed, long k, int size) {
        byte[] raw = bytes(seed, k, "body", size);
        if (k % 3 != 0 || size > TEXT_LIMIT) return raw;
        ByteArrayOutputStream text = new ByteArrayOutputStream();
        for (String letter : text(raw)) {
            byte[] encoded = letter.getBytes(StandardCharsets.UTF_8);
            if (text.size() + encoded.length > size) break;
            text.writeBytes(encoded);
        }
        byte[] body = Arrays.copyOf(text.toByteArray(), size);
        Arrays.fill(body, text.size(), size, (byte) 'x');
        return body;
    }

    private static String[] text(byte[] raw) {
        String[] letters = new String[raw.length];
        for (int i = 0; i < raw.length; i++) letters[i] = LETTERS[(raw[i] & 0xff) % LETTERS.length];
        return letters;
    }

    private static long unsigned(byte[] data, int at) {
        return Integer.toUnsignedLong(ByteBuffer.wrap(data).getInt(at));
    }

    private static byte[] bytes(long seed, long k, String purpose, int length) {
        return Shake256.of((seed + "/" + k + "/" + purpose).getBytes(StandardCharsets.UTF_8), length);
    }
}
