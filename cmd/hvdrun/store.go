package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"strconv"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/bootstrap"
	"github.com/gohvd/gohvd/internal/netif"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/store"
	"github.com/gohvd/gohvd/store/c10d"
)

const storeCommand = "store"

// storeFlags holds the flags of hvdrun store.
type storeFlags struct {
	listen     string
	secretFile string
	insecure   bool
	torch      bool
	torch21    bool
}

func (r *runner) storeCommand() *cobra.Command {
	var s storeFlags
	cmd := &cobra.Command{
		Use:   storeCommand + " --listen HOST:PORT [flags]",
		Short: "Serve a store for ranks that another launcher starts",
		Long: `Serve a store for ranks that another launcher starts, until SIGINT or SIGTERM. Once the store accepts connections,
hvdrun prints its address. The store keeps its contents only in memory.

Set HOROVOD_GLOO_RENDEZVOUS_ADDR and HOROVOD_GLOO_RENDEZVOUS_PORT in the environment of the ranks to the host and the
port of this address. On loopback without --secret-file, hvdrun makes a secret that ranks of the same user get from it. With --torch, set MASTER_ADDR and MASTER_PORT for torch.distributed instead, and also
TORCHELASTIC_USE_AGENT_STORE=True.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return r.serveStore(cmd.Context(), &s) },

		DisableFlagsInUseLine: true,
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVar(&s.listen, "listen", "127.0.0.1:0", "address `HOST:PORT` at which the store listens; port 0 chooses a free port")
	f.StringVar(&s.secretFile, "secret-file", "",
		"`FILE` with the secret that clients must know, at least 16 bytes (for the ranks: HVD_SECRET_FILE); "+
			"- reads it from the first line of standard input, and serves the store until standard input ends")
	f.BoolVar(&s.insecure, "insecure", false,
		"serve without a secret, even if other users or hosts can reach the address (for the ranks: HVD_INSECURE)")
	f.BoolVar(&s.torch, "torch", false, "speak PyTorch's TCPStore protocol, which is unauthenticated, instead of gohvd's own store protocol")
	f.BoolVar(&s.torch21, "torch-2.1", false,
		"if a client is older than PyTorch 2.2, assume that it is PyTorch 2.1 and not an earlier version")
	f.BoolVar(&r.verbose, "verbose", false, "log when clients connect and disconnect")
	return cmd
}

// serveStore serves a store until hvdrun gets SIGINT or SIGTERM. If the secret comes from standard input, the
// store also ends with standard input, because then the program that started it has ended.
func (r *runner) serveStore(ctx context.Context, s *storeFlags) error {
	ctx, stop := signal.NotifyContext(ctx, unignored(unix.SIGINT, unix.SIGTERM)...)
	defer stop()
	cfg := store.Config{Log: r.logger()}
	listen, port, err := listenAddr(s.listen)
	switch {
	case s.torch && s.secretFile != "":
		return usagef("--torch and --secret-file cannot be used together, because PyTorch's protocol has no secret")
	case s.secretFile != "":
		text, err := readSecret(s.secretFile, stop)
		if err == nil {
			cfg.Secret, err = secret.Parse(text)
		}
		if err != nil {
			return usagef("--secret-file: %v", err)
		}
	case err != nil:
		return usagef("--listen: %v", err)
	case !s.insecure && !netif.IsLoopback(s.listen):
		return usagef("--listen %s: other hosts can reach this address and there is no secret: give --secret-file, or give --insecure to let any client change the store", s.listen)
	}
	hash := store.NewHashStore(store.Limits{})
	defer hash.Close()
	var text string // the secret that hvdrun makes, if there is one
	if cfg.Secret.IsZero() && !s.insecure && !s.torch {
		cfg.Secret, text = secret.New()
	}
	offer := func(addr string) (stop func() error, err error) {
		if text == "" {
			return func() error { return nil }, nil
		}
		return bootstrap.OfferSecret(addr, text, cfg.Log)
	}
	var stopOffer func() error
	if port != 0 {
		if stopOffer, err = offer(listen); err != nil {
			return err
		}
		defer stopOffer()
	}
	server, err := serveEither(s, hash, cfg)
	if err != nil {
		return err
	}
	if port == 0 {
		if stopOffer, err = offer(server.Addr()); err != nil {
			return errors.Join(err, server.Close())
		}
		defer stopOffer()
	}
	fmt.Fprintf(r.stdout, "listening on %s\n", server.Addr())
	<-ctx.Done()
	return server.Close()
}

// readSecret returns the text of the secret in a file. If name is "-", the secret is the first line of
// standard input, and ended is called when standard input ends.
func readSecret(name string, ended func()) (string, error) {
	if name != "-" {
		text, err := os.ReadFile(name)
		return string(text), err
	}
	stdin := bufio.NewReader(os.Stdin)
	text, err := stdin.ReadString('\n')
	go func() {
		_, _ = io.Copy(io.Discard, stdin)
		ended()
	}()
	return text, err
}

// listenAddr returns addr with its port as a number, because clients compute the name of the socket that
// hands over the secret from the address that they dial. The port is 0 if the system chooses it.
func listenAddr(addr string) (numeric string, port int, err error) {
	host, name, err := net.SplitHostPort(addr)
	if err == nil && name != "" {
		port, err = net.LookupPort("tcp", name)
	}
	return net.JoinHostPort(host, strconv.Itoa(port)), port, err
}

// server is the common interface of the servers for gohvd's and for PyTorch's protocol.
type server interface {
	io.Closer
	Addr() string
}

func serveEither(s *storeFlags, hash *store.HashStore, cfg store.Config) (server, error) {
	if s.torch {
		return c10d.Serve(s.listen, hash, c10d.Config{Torch21: s.torch21, Log: cfg.Log})
	}
	return store.Serve(s.listen, hash, cfg)
}
