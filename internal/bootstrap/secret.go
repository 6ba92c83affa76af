package bootstrap

import (
	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/secret"
)

// jobSecret returns the secret from the settings. If the setting TLS is on, connections with this secret are
// encrypted.
func jobSecret(set *config.Config) (secret.Secret, error) {
	s, err := set.JobSecret()
	if err == nil && set.TLS && !s.IsZero() {
		s = s.Encrypted()
	}
	return s, err
}
