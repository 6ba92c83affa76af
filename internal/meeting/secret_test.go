package meeting

import (
	"net"
	"testing"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/secret"
)

// A secret encrypts if the settings say so; none cannot.
func TestSecretOf(t *testing.T) {
	for _, set := range []config.Config{
		{}, {TLS: true}, {Secret: "sixteen bytes it is"}, {Secret: "sixteen bytes it is", TLS: true},
	} {
		s, err := secretOf(&set)
		if err != nil || s.IsZero() != (set.Secret == "") || s.IsEncrypted() != (set.Secret != "" && set.TLS) {
			t.Errorf("%+v: got %v, encrypted: %v, %v", set, s, s.IsEncrypted(), err)
		}
	}
	if _, err := secretOf(&config.Config{Secret: "short", TLS: true}); err == nil {
		t.Error("a short secret is taken")
	}
}

// proves has two secrets meet.
func proves(a, b secret.Secret) error {
	x, y := net.Pipe()
	defer x.Close()
	defer y.Close()
	done := make(chan error, 1)
	go func() {
		_, err := b.Accept(y, "test")
		done <- err
	}()
	if _, err := a.Dial(x, "test"); err != nil {
		return err
	}
	return <-done
}
