package config

import (
	"fmt"
	"os"

	"github.com/gohvd/gohvd/internal/secret"
)

// JobSecret returns the secret of the job. It takes the secret from HVD_SECRET or, if that is not set, from
// the file that HVD_SECRET_FILE names. If neither is set, JobSecret returns the zero Secret. The Secret does
// not turn on encryption: if TLS is set, callers that use it on a network must call its method Encrypted. A
// file without a secret is an error. Errors contain no part of the secret.
func (c *Config) JobSecret() (secret.Secret, error) {
	name, text := "HVD_SECRET", c.Secret
	if text == "" {
		if c.SecretFile == "" {
			return secret.Secret{}, nil
		}
		b, err := os.ReadFile(c.SecretFile)
		if err != nil {
			return secret.Secret{}, fmt.Errorf("HVD_SECRET_FILE: %w", err)
		}
		if name, text = "HVD_SECRET_FILE "+c.SecretFile, string(b); text == "" {
			return secret.Secret{}, fmt.Errorf("%s is empty", name)
		}
	}
	s, err := secret.Parse(text)
	if err != nil {
		return s, fmt.Errorf("%s: %w", name, err)
	}
	return s, nil
}
