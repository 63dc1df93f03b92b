import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse.BodyHandlers;

/** Asks one question, whole and streamed, and prints the bodies. Exits with 1 on any status but 200. */
public class Chat {
    public static void main(String[] arguments) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        for (boolean stream : new boolean[] {false, true}) {
            String body = "{\"messages\": [{\"role\": \"user\", \"content\": \"What is the capital of France?\"}],"
                + "\"stream\": " + stream + "}";
            HttpRequest request = HttpRequest.newBuilder(URI.create(arguments[0] + "/v1/chat/completions"))
                .header("Content-Type", "application/json")
                .POST(BodyPublishers.ofString(body))
                .build();
            var response = client.send(request, BodyHandlers.ofLines());
            response.body().forEach(System.out::println);
            if (response.statusCode() != 200) {
                System.exit(1);
            }
        }
    }
}
