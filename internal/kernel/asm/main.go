// Command asm writes the assembly of package kernel for amd64, and the Go file that declares it. It is run by go generate
// in the folder of that package.
package main

import (
	"fmt"
	"os"
)

func main() {
	code, decls := amd64()
	for name, text := range map[string]string{"generated_amd64.s": code, "generated_amd64.go": decls} {
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			fmt.Fprintf(os.Stderr, "asm: %v\n", err)
			os.Exit(1)
		}
	}
}
