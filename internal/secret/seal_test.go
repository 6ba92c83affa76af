package secret_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/gohvd/gohvd/internal/secret"
)

// A sealed value is accepted only with the secret and the name with which it was sealed.
func TestSeal(t *testing.T) {
	s, _ := secret.New()
	other, _ := secret.New()
	for _, value := range []string{"", "127.0.0.1:4711"} {
		sealed := s.Seal("key", []byte(value))
		if got, err := s.Unseal("key", sealed); string(got) != value || err != nil {
			t.Errorf("got %q, %v, want %q", got, err, value)
		}
		changed := append([]byte(nil), sealed...)
		changed[len(changed)-1] ^= 1
		for what, unseal := range map[string]func() ([]byte, error){
			"another secret":         func() ([]byte, error) { return other.Unseal("key", sealed) },
			"another name":           func() ([]byte, error) { return s.Unseal("kez", sealed) },
			"the name moved":         func() ([]byte, error) { return s.Unseal("ke", append(sealed[:32:32], "y"+value...)) },
			"another value":          func() ([]byte, error) { return s.Unseal("key", changed) },
			"a longer value":         func() ([]byte, error) { return s.Unseal("key", append(bytes.Clone(sealed), 0)) },
			"a value without a seal": func() ([]byte, error) { return s.Unseal("key", []byte(value)) },
			"nothing":                func() ([]byte, error) { return s.Unseal("key", nil) },
		} {
			if got, err := unseal(); !errors.Is(err, secret.ErrForged) {
				t.Errorf("%s: got %q, %v, want ErrForged", what, got, err)
			}
		}
	}
}

// Unseal accepts no bytes without the HMAC, and returns those after it.
func FuzzUnseal(f *testing.F) {
	s, _ := secret.New()
	f.Add("key", []byte(nil))
	f.Add("key", s.Seal("key", []byte("value")))
	f.Fuzz(func(t *testing.T, name string, b []byte) {
		if value, err := s.Unseal(name, b); err == nil && !bytes.Equal(s.Seal(name, value), b) {
			t.Errorf("%q: %x was accepted", name, b)
		}
	})
}
