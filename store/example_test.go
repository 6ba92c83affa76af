package store_test

import (
	"context"
	"fmt"
	"time"

	"github.com/gohvd/gohvd/store"
)

// ExampleServe connects a client to a server. Both use the same secret.
func ExampleServe() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	secret, err := store.ParseSecret("the contents of HVD_SECRET_FILE")
	if err != nil {
		panic(err)
	}
	cfg := store.Config{Secret: secret}

	contents := store.NewHashStore(store.Limits{})
	defer contents.Close()
	server, err := store.Serve("127.0.0.1:0", contents, cfg)
	if err != nil {
		panic(err)
	}
	defer server.Close()

	client, err := store.Dial(ctx, server.Addr(), cfg)
	if err != nil {
		panic(err)
	}
	defer client.Close()
	if err := client.Set(ctx, "greeting", []byte("hello")); err != nil {
		panic(err)
	}
	value, err := client.Get(ctx, "greeting")
	fmt.Printf("%s %v\n", value, err)

	_, err = store.ParseSecret("too short")
	fmt.Println(err)
	fmt.Printf("%+v\n", cfg.Secret)
	// Output:
	// hello <nil>
	// store: the secret has 9 bytes, want 16 to 4096
	// a secret
}
