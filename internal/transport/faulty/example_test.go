package faulty_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"syscall"

	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/faulty"
	"github.com/gohvd/gohvd/internal/transport/mem"
)

func Example() {
	cable := &faulty.Rule{Name: "cable", Pairs: faulty.Pair(0, 1), CutAfterBytes: 5}
	network, cluster := faulty.New(1, cable), mem.New(2)
	zero, one := network.Wrap(0, cluster.Mesh(0)), network.Wrap(1, cluster.Mesh(1))
	var wg sync.WaitGroup
	wg.Go(func() {
		conn, err := zero.Conn(context.Background(), transport.Control, 1)
		if err != nil {
			panic(err)
		}
		err = errors.Join(conn.Send([]byte("hello, world")), conn.Flush())
		if !errors.Is(err, syscall.ECONNRESET) {
			panic(err)
		}
	})
	conn, err := one.Conn(context.Background(), transport.Control, 0)
	if err != nil {
		panic(err)
	}
	word, err := io.ReadAll(conn)
	wg.Wait()
	fmt.Printf("%s; %v; %d bytes\n", word, errors.Unwrap(err), cable.Counts().Bytes)
	if err := errors.Join(zero.Close(), one.Close()); err != nil {
		panic(err)
	}
	// Output: hello; faulty: rule "cable" cut the connection: connection reset by peer; 5 bytes
}
