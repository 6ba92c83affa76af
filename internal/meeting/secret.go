package meeting

import (
	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/secret"
)

// secretOf is the secret of the job, encrypted if the settings say so.
func secretOf(set *config.Config) (secret.Secret, error) {
	s, err := set.JobSecret()
	if err == nil && set.TLS && !s.IsZero() {
		s = s.Encrypted()
	}
	return s, err
}
