{{/* Checks of combinations of values, which a schema cannot express. Each message says what to do. */}}

{{- define "tiphys.check" -}}
{{- $namespaces := include "tiphys.namespaces" . | fromJsonArray -}}
{{- $url := .Values.store.url -}}
{{- if not $url -}}
{{- fail "\n\nstore.url is not set: give the URL of the storage of runs, such as --set store.url=s3://ml-runs/tiphys\n" -}}
{{- end -}}
{{- $several := or .Values.clusterWide (gt (len $namespaces) 1) -}}
{{- if and $several (not (contains "{namespace}" $url)) -}}
{{- $why := ternary "with clusterWide: true" (printf "with namespaces %s" (join ", " $namespaces)) .Values.clusterWide -}}
{{- fail (printf "\n\nstore.url %s is the same for every tenant: %s it must hold {namespace}, such as s3://ml-runs/{namespace}/tiphys\n" $url $why) -}}
{{- end -}}
{{- if not .Values.image.repository -}}
{{- fail "\n\nimage.repository is not set: give the image that you built and pushed, such as --set image.repository=registry.example.com/tiphys\n" -}}
{{- end -}}
{{- end }}
