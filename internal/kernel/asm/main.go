// Command asm writes the assembly of package kernel for amd64 and arm64, and the Go files that declare its
// functions. go generate runs it in the directory of that package.
package main

import (
	"fmt"
	"os"
)

func main() {
	for arch, generate := range map[string]func() (code, decls string){"amd64": amd64, "arm64": arm64} {
		code, decls := generate()
		for suffix, text := range map[string]string{".s": code, ".go": decls} {
			if err := os.WriteFile("generated_"+arch+suffix, []byte(text), 0o644); err != nil {
				fmt.Fprintf(os.Stderr, "asm: %v\n", err)
				os.Exit(1)
			}
		}
	}
}
