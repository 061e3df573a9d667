// Reads a Compose file as docker compose does, checks it against the schema, and prints it as JSON.
package main

import (
	"context"
	"fmt"
	"log"
	"os"

	"github.com/compose-spec/compose-go/v2/cli"
)

func main() {
	options, err := cli.NewProjectOptions(os.Args[1:], cli.WithOsEnv)
	if err != nil {
		log.Fatal(err)
	}
	project, err := options.LoadProject(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	text, err := project.MarshalJSON()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(string(text))
}
