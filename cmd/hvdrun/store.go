package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/store"
	"github.com/gohvd/gohvd/store/c10d"
)

const storeCommand = "store"

// aloneStore holds the flags of hvdrun store.
type aloneStore struct {
	listen     string
	secretFile string
	insecure   bool
	torch      bool
	torch21    bool
	tls        bool
}

func (r *runner) storeCommand() *cobra.Command {
	var s aloneStore
	cmd := &cobra.Command{
		Use:   storeCommand + " --listen HOST:PORT [flags]",
		Short: "Serve a store alone, for ranks that something else starts",
		Long: `Serve a store alone, for ranks that something else starts, until SIGINT or SIGTERM. Its address is printed once it listens.

Ranks find it by HOROVOD_GLOO_RENDEZVOUS_ADDR and HOROVOD_GLOO_RENDEZVOUS_PORT, torch.distributed with --torch by MASTER_ADDR,
MASTER_PORT and TORCHELASTIC_USE_AGENT_STORE=True. What it holds is gone when it ends.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return r.serveAlone(cmd.Context(), &s) },

		DisableFlagsInUseLine: true,
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVar(&s.listen, "listen", "127.0.0.1:0", "`HOST:PORT` to listen on; port 0 takes a free one")
	f.StringVar(&s.secretFile, "secret-file", "", "`FILE` with the secret that clients must know, 16 bytes or more (HVD_SECRET_FILE of the ranks)")
	f.BoolVar(&s.tls, "tls", false, "encrypt connections (HVD_TLS of the ranks); takes --secret-file")
	f.BoolVar(&s.insecure, "insecure", false, "serve without a secret though others than this host can reach the address")
	f.BoolVar(&s.torch, "torch", false, "speak PyTorch's protocol, which knows no secret")
	f.BoolVar(&s.torch21, "torch-2.1", false, "old clients are of PyTorch 2.1, not of an older one")
	f.BoolVar(&r.verbose, "verbose", false, "log who comes and goes")
	return cmd
}

// serveAlone serves a store until SIGINT or SIGTERM.
func (r *runner) serveAlone(ctx context.Context, s *aloneStore) error {
	ctx, stop := signal.NotifyContext(ctx, unix.SIGINT, unix.SIGTERM)
	defer stop()
	cfg := store.Config{Log: r.logger()}
	switch {
	case s.tls && s.secretFile == "":
		return usagef("--tls needs --secret-file: certificates are made of the secret")
	case s.torch && s.secretFile != "":
		return usagef("--torch and --secret-file exclude each other: PyTorch's protocol knows no secret")
	case s.secretFile != "":
		text, err := os.ReadFile(s.secretFile)
		if err == nil {
			cfg.Secret, err = secret.Parse(string(text))
		}
		if err != nil {
			return usagef("--secret-file: %v", err)
		}
		if s.tls {
			cfg.Secret = cfg.Secret.Encrypted()
		}
	case !s.insecure && !isLoopback(s.listen):
		return usagef("--listen %s: others can reach it, and there is no secret: give --secret-file, or --insecure to let anybody change what it holds", s.listen)
	}
	hash := store.NewHashStore(store.Limits{})
	defer hash.Close()
	server, err := serveEither(s, hash, cfg)
	if err != nil {
		return err
	}
	fmt.Fprintf(r.stdout, "listening on %s\n", server.Addr())
	<-ctx.Done()
	return server.Close()
}

// server is the common interface of the two kinds of server.
type server interface {
	io.Closer
	Addr() string
}

func serveEither(s *aloneStore, hash *store.HashStore, cfg store.Config) (server, error) {
	if s.torch {
		return c10d.Serve(s.listen, hash, c10d.Config{Torch21: s.torch21, Log: cfg.Log})
	}
	return store.Serve(s.listen, hash, cfg)
}

// isLoopback reports whether only this host can reach an address. It is true for a malformed address.
func isLoopback(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return true // listening on it returns the error
	}
	ip := net.ParseIP(host)
	return strings.EqualFold(host, "localhost") || ip != nil && ip.IsLoopback()
}
