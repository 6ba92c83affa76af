package secret

import "crypto/tls"

// TLS returns how the processes of a job speak it.
func (s Secret) TLS() *tls.Config { return s.tls }
