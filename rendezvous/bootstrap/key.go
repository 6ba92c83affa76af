package bootstrap

import (
	"encoding/hex"
	"fmt"

	"github.com/gohvd/gohvd/secret"
)

// Addr is where the root of id listens, host:port; empty if id is none.
func (id ID) Addr() string {
	m, err := id.open()
	if err != nil {
		return ""
	}
	return m.addr
}

// Key is a secret of the ranks that have these ids, in this order, which is also that of their ring, and a name for their job,
// which shows nothing of the ids.
func Key(ids []ID) (key secret.Secret, job string, err error) {
	_, list, key, err := meetings(ids)
	if err != nil {
		return secret.Secret{}, "", fmt.Errorf("bootstrap: %w", err)
	}
	return key, "id-" + hex.EncodeToString(list[:8]), nil
}
