// Command pause holds the namespaces of a pod open. It is process 1 where a pod shares them, so the kernel is asked to
// reap what is left to it.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	signal.Ignore(syscall.SIGCHLD)
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGINT, syscall.SIGTERM)
	<-stop
}
