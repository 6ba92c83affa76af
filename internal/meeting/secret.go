package meeting

import (
	"fmt"
	"os"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/secret"
)

// secretOf is the secret of the job, that of the launcher or that of a file, and encrypted if the settings say so.
func secretOf(set *config.Config) (secret.Secret, error) {
	name, text := "HVD_SECRET", set.Secret
	if text == "" && set.SecretFile != "" {
		b, err := os.ReadFile(set.SecretFile)
		if err != nil {
			return secret.Secret{}, fmt.Errorf("HVD_SECRET_FILE: %w", err)
		}
		name, text = "HVD_SECRET_FILE "+set.SecretFile, string(b)
	}
	if text == "" {
		if name != "HVD_SECRET" {
			return secret.Secret{}, fmt.Errorf("%s is empty", name)
		}
		return secret.Secret{}, nil
	}
	s, err := secret.Parse(text)
	if err != nil {
		return s, fmt.Errorf("%s: %w", name, err)
	}
	if set.TLS {
		s = s.Encrypted()
	}
	return s, nil
}
