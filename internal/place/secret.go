package place

import (
	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/secret"
)

// jobSecret returns the secret that the settings give. Connections with it are encrypted if the settings say
// so.
func jobSecret(set *config.Config) (secret.Secret, error) {
	s, err := set.JobSecret()
	if err == nil && set.TLS && !s.IsZero() {
		s = s.Encrypted()
	}
	return s, err
}
