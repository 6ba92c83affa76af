package bootstrap

import (
	"errors"
	"maps"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/store"
)

// onLoopbackBy opens the two ranks of a job on loopback that meet by the given init method. No secret is
// given.
func onLoopbackBy(t *testing.T, method string, vars map[string]string) (met []*Meeting, errs []error) {
	t.Helper()
	return all(t, eachRank(2, func(r int) Config {
		own := map[string]string{"HOROVOD_RANK": strconv.Itoa(r), "HOROVOD_SIZE": "2"}
		maps.Copy(own, vars)
		return Config{Settings: settings(t, own), Method: method}
	})...)
}

// wantOneSecret checks that no rank has an error, and that all ranks have the same secret and, with HVD_TLS,
// encrypt.
func wantOneSecret(t *testing.T, met []*Meeting, errs []error, encrypt bool) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	for r, m := range met {
		if m.Secret.IsZero() || m.Secret.IsEncrypted() != encrypt {
			t.Fatalf("rank %d: got %v, encrypts %v, want %v", r, m.Secret, m.Secret.IsEncrypted(), encrypt)
		}
		if _, err := m.Secret.Unseal("k", met[0].Secret.Seal("k", nil)); err != nil {
			t.Errorf("rank %d has another secret than rank 0", r)
		}
	}
}

// Ranks that meet on loopback without a secret of the user make one. A process without it is refused.
func TestSecretOnLoopback(t *testing.T) {
	for _, tls := range []string{"0", "1"} {
		port := strconv.Itoa(testnet.FreePort(t))
		met, errs := onLoopbackBy(t, "tcp://localhost:"+port, map[string]string{"HVD_TLS": tls})
		wantOneSecret(t, met, errs, tls == "1")
		_, err := store.Dial(testnet.Context(t), net.JoinHostPort(loopback, port), store.Config{})
		if !errors.Is(err, secret.ErrNeeded) {
			t.Errorf("a process without the secret: got %v, want %v", err, secret.ErrNeeded)
		}

		file := filepath.Join(t.TempDir(), "file")
		met, errs = onLoopbackBy(t, "file://"+file, map[string]string{"HVD_TLS": tls})
		wantOneSecret(t, met, errs, tls == "1")
		if st, err := os.Stat(file); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("the file with the secret has mode %v, %v", st.Mode(), err)
		}
	}
	met, errs := onLoopbackBy(t, "tcp://127.0.0.1:"+strconv.Itoa(testnet.FreePort(t)),
		map[string]string{"HVD_INSECURE": "1"})
	if err := errors.Join(errs...); err != nil || !met[0].Secret.IsZero() || !met[1].Secret.IsZero() {
		t.Errorf("HVD_INSECURE: got a secret, %v", err)
	}
}

// If other users can read the file in which ranks meet, the file gets no secret, and the ranks warn. If it
// belongs to another user, they refuse it.
func TestSharedFile(t *testing.T) {
	shared := filepath.Join(t.TempDir(), "file")
	if err := errors.Join(os.WriteFile(shared, nil, 0o644), os.Chmod(shared, 0o644)); err != nil {
		t.Fatal(err)
	}
	log, entries := testnet.Logs()
	m, err := Open(testnet.Context(t), Config{Log: log, Method: "file://" + shared,
		Settings: settings(t, map[string]string{"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"})})
	if err != nil {
		t.Fatal(err)
	}
	if !m.Secret.IsZero() || !testnet.Logged(entries, "every user of this host can take part") {
		t.Errorf("got %v and %v", m.Secret, entries.All())
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	if b, err := os.ReadFile(shared); err != nil || strings.Contains(string(b), fileSecretKey) {
		t.Errorf("a secret is in a file that others can read: %q, %v", b, err)
	}
	if os.Geteuid() != 0 {
		t.Skip("only root may give a file to another user")
	}
	foreign := filepath.Join(t.TempDir(), "file")
	if err := errors.Join(os.WriteFile(foreign, nil, 0o600), os.Chown(foreign, 12345, -1)); err != nil {
		t.Fatal(err)
	}
	_, errs := onLoopbackBy(t, "file://"+foreign, nil)
	for _, err := range errs {
		testnet.WantError(t, err, "belongs to user 12345", "HVD_SECRET_FILE")
	}
}

// Ranks that were told the address of a store on loopback get the secret that it hands over. If it hands over
// none, they refuse it, because another user may serve it.
func TestSecretOfLoopbackStore(t *testing.T) {
	s, text := secret.New()
	hash := newStore(t)
	server := serve(t, hash, s)
	host, port, _ := net.SplitHostPort(server.Addr())
	vars := map[string]string{"HOROVOD_GLOO_RENDEZVOUS_ADDR": host, "HOROVOD_GLOO_RENDEZVOUS_PORT": port}
	_, errs := onLoopbackBy(t, "", vars)
	for _, err := range errs {
		testnet.WantError(t, err, "requires the secret")
	}
	stop, err := OfferSecret(server.Addr(), text, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stop() })
	met, errs := onLoopbackBy(t, "", vars)
	wantOneSecret(t, met, errs, false)

	open := serve(t, hash, secret.Secret{})
	_, vars["HOROVOD_GLOO_RENDEZVOUS_PORT"], _ = net.SplitHostPort(open.Addr())
	_, errs = onLoopbackBy(t, "", vars)
	for _, err := range errs {
		testnet.WantError(t, err, ErrNotOffered.Error())
	}
	vars["HVD_INSECURE"] = "1"
	if _, errs = onLoopbackBy(t, "", vars); errors.Join(errs...) != nil {
		t.Errorf("HVD_INSECURE: got %v", errs)
	}
}
