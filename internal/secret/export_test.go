package secret

import "crypto/tls"

// TLS returns the configuration of TLS with which the processes of a job connect.
func (s Secret) TLS() *tls.Config { return s.tls }
