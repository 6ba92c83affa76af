package secret

import "crypto/tls"

// TLS returns the TLS configuration for connections with s. It is nil if s does not encrypt.
func (s Secret) TLS() *tls.Config {
	if !s.encrypt {
		return nil
	}
	return s.job.tls()
}
