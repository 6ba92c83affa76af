package secret

import (
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
)

// ErrForged reports that a value was not sealed with this secret for its name.
var ErrForged = errors.New(
	"the value is not authentic: a process without the secret of this job, or with another one, has written it")

// Seal returns value preceded by an HMAC-SHA256 over name and value. The key of the HMAC is derived from the
// secret. Seal authenticates the value, but does not encrypt it. s must not be zero.
func (s Secret) Seal(name string, value []byte) []byte {
	return append(s.tag(name, value), value...)
}

// Unseal returns the value that Seal has sealed with the same secret and name. If sealed is anything else,
// the error is ErrForged. An older value of the same name is also authentic.
func (s Secret) Unseal(name string, sealed []byte) (value []byte, err error) {
	if len(sealed) < sha256.Size {
		return nil, ErrForged
	}
	value = sealed[sha256.Size:]
	if !hmac.Equal(sealed[:sha256.Size], s.tag(name, value)) {
		return nil, ErrForged
	}
	return value, nil
}

func (s Secret) tag(name string, value []byte) []byte {
	key, err := hkdf.Key(sha256.New, s.job.key[:], nil, "gohvd value", sha256.Size)
	if err != nil {
		panic("secret: " + err.Error()) // fails only if this function has a bug
	}
	h := hmac.New(sha256.New, key)
	// The length separates the name from the value.
	h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(name))))
	h.Write([]byte(name))
	h.Write(value)
	return h.Sum(nil)
}
